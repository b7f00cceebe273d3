"""The model, loads and candidates that `subquad plan` measures, from the settings alone; in a worker too."""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from subquad import hf
from subquad.core.errors import InputError, as_input_error
from subquad.methods import BoundMethod, Method, parse_method
from subquad.tools.calibrate.fitted import calibrated
from subquad.tools.calibrate.settings import LEARNED
from subquad.tools.data.texts import read_documents, report_folders, standard_library
from subquad.tools.measure.deadline import Deadline
from subquad.tools.measure.group import ALONE, MeasuringGroup
from subquad.tools.models.generation import check_new_tokens
from subquad.tools.models.passages import read
from subquad.tools.models.pretrained import Pretrained, load
from subquad.tools.models.split_methods import check_not_fitted
from subquad.tools.plan.arguments import check_settings
from subquad.tools.plan.loads import PlanInputs, batch_load, batches_by_length, text_load
from subquad.tools.plan.measure import Candidate, SingleLosses
from subquad.tools.plan.planning import candidates_for
from subquad.tools.plan.settings import PLANNED_LENGTHS, PlanSettings
from subquad.tools.runs.floor import Floor
from subquad.tools.runs.jobs import Progress, silent


@dataclass(frozen=True)
class Prepared:
    """The model to plan for, its inputs, and the methods to try.

    Attributes:
        pretrained: the model, with its own positions.
        loads: inputs of each length.
        metadata: metadata of the model and the text.
        methods: the methods to try; None for those of the grid.
        fitted: learned parameters to try, by name and layer.
        notes: sentences on the weights, and on methods that are not tried.
    """

    pretrained: Pretrained
    loads: list[PlanInputs]
    metadata: dict[str, Any]
    methods: list[Method] | None
    fitted: dict[str, dict[int, BoundMethod]]
    notes: tuple[str, ...]


def prepare(
    settings: PlanSettings,
    out: Path,
    progress: Progress,
    group: MeasuringGroup = ALONE,
    deadline: Deadline | None = None,
) -> Prepared:
    """Load the model and the text, and fit what is to be fitted; adapters in `out` are used again.

    Fitting does not count for the deadline.

    Raises:
        InputError: something in the settings does not work; the message has the remedy.
    """
    methods, documents = parse_inputs(settings)
    check_not_fitted(settings.calibrate, group)
    report_folders(progress, settings.text)
    pretrained = load(settings.model, settings.device, group, settings.dtype)
    pretrained = pretrained.extended_to(settings.extend, settings.named_lengths)
    adapters = _adapters(settings.adapters, pretrained)
    loads, metadata = of_text(pretrained, documents or standard_library(), settings)
    # As compare does: those that are named, or its own.
    able = list(map(parse_method, LEARNED)) if methods is None else methods
    length = pretrained.length(None, "max-length")
    with nullcontext() if deadline is None else deadline.paused():
        rows, reasons = calibrated(
            settings.calibrate, settings.text, settings.column, able, pretrained, length, out, progress
        )
    fitted = adapters | {str(method): row.bounds for method, row in rows.items()}
    saved = {bound.method for bounds in adapters.values() for bound in bounds.values() if bound.method.traits.learned}
    others = None if methods is None else [method for method in methods if method not in {*rows, *reasons, *saved}]
    untried = (f"{method} was not tried: {reason}." for method, reason in reasons.items())
    return Prepared(pretrained, loads, metadata, others, fitted, (*pretrained.notes, *untried))


def loss_elsewhere(
    settings: PlanSettings, out: Path, length: int, item: int, candidate: str, layers: tuple[int, ...]
) -> float:
    """The result of `SingleLosses.loss` in a worker: a passage's loss with a candidate, by its name, in some layers."""
    losses, by_name = _losses_once(settings, out, length)
    return losses.loss(item, {number: by_name[candidate].by_layer[number] for number in layers})


@lru_cache(maxsize=1)
def _losses_once(settings: PlanSettings, out: Path, length: int) -> tuple[SingleLosses, dict[str, Candidate]]:
    prepared = _prepared_once(settings, out)
    load = next(load for load in prepared.loads if load.length == length)
    candidates = candidates_for(load.model, prepared.methods, prepared.fitted)(length)
    return SingleLosses(load), {candidate.name: candidate for candidate in candidates}


@lru_cache(maxsize=1)
def _prepared_once(settings: PlanSettings, out: Path) -> Prepared:
    return prepare(settings, out, silent)


def parse_inputs(settings: PlanSettings) -> tuple[list[Method] | None, list[str] | None]:
    """The methods and the documents that the settings name, if any."""
    check_settings(settings)
    with as_input_error():
        methods = [parse_method(text) for text in settings.methods] or None
    return methods, read_documents(settings.text, settings.column) if settings.text else None


def of_text(
    pretrained: Pretrained, documents: Sequence[str], settings: PlanSettings
) -> tuple[list[PlanInputs], dict[str, Any]]:
    """The inputs that are made from documents for a text model that is loaded; and the facts of both."""
    figure = Floor.for_model(settings, pretrained.kind).figure
    longest = pretrained.length(None, "--lengths", most=PLANNED_LENGTHS[-1])  # of texts whose own lengths are planned
    lengths = settings.model_lengths or (longest,)
    if settings.lengths is None and pretrained.is_rotary:  # whose positions are extended only if that is asked for
        reach = settings.extend or pretrained.limit or math.inf
        lengths = tuple(n for n in lengths if n <= reach) or (longest,)
    check_new_tokens(pretrained, settings.new_tokens, lengths)
    reading = read(pretrained, documents, min(lengths), 1, settings.seed)
    if settings.is_from_text or settings.batch > 1:
        cut = {length: reading.batches(pretrained, length, None, settings.batch, settings.seed) for length in lengths}
        batches = batches_by_length(cut[longest]) if settings.is_from_text else cut
        shorter = [0, *batches]
        loads = [
            batch_load(pretrained, each, before, length, figure, settings.new_tokens)
            for before, (length, each) in zip(shorter, batches.items(), strict=False)
        ]
    else:
        start = settings.seed * 997 % max(len(reading.tokens), 1)
        tokens = reading.tokens[start:] + reading.tokens[:start]  # other passages for other seeds
        turned, new = replace(reading, tokens=tokens), settings.new_tokens
        loads = [text_load(pretrained, turned, length, figure, new) for length in lengths]
    text = {"fingerprint": _mark(reading.tokens), "tokens": len(reading.tokens), "documents": reading.documents}
    return loads, {"model": pretrained.metadata(), "text": text, "identity": pretrained.identity()}


def _adapters(folders: Sequence[Path], pretrained: Pretrained) -> dict[str, dict[int, BoundMethod]]:
    """Adapters as candidates, by name."""
    bounds: dict[str, dict[int, BoundMethod]] = {}
    for folder in folders:
        name = f"adapter:{folder.resolve().name}"
        if name in bounds:
            raise InputError(f"two of the adapters are called {folder.resolve().name}, the second being {folder}")
        with as_input_error():
            bounds[name] = hf.read_adapter(folder).bounds(pretrained.model)
    return bounds


def _mark(tokens: Sequence[int]) -> str:
    """A mark of a text in 16 hexadecimal digits."""
    return sha256(",".join(map(str, tokens)).encode()).hexdigest()[:16]
