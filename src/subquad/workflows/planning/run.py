"""`subquad plan` on a text model, and `sq.plan` on any module: from what the user gives to a plan with its record."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from subquad import hf
from subquad.data.texts import read_documents, standard_library
from subquad.errors import InputError, as_input_error
from subquad.hf.adapters import describe_model
from subquad.hf.plans import Plan
from subquad.methods import Bound, Method, parse_method, resolve
from subquad.workflows import machine
from subquad.workflows.options import as_command
from subquad.workflows.passages import read
from subquad.workflows.planning.loads import Load, Loss, input_loads, text_load
from subquad.workflows.planning.plan import Planning, candidates_for, plan_of
from subquad.workflows.pretrained import Pretrained, load
from subquad.workflows.settings import PlanSettings
from subquad.workflows.store import Progress, Store

UNITS = 1  # changes with what the units hold, so that a run of another version is not resumed
LEAST_MINUTES = 0.1


@dataclass(frozen=True)
class Made:
    """A plan, and all that it was chosen from."""

    plan: Plan
    planning: Planning
    facts: dict[str, Any]  # of the model, for the report


def make(settings: PlanSettings, out: Path, progress: Progress) -> Made:
    """Plan for a text model. Finished units are kept under `out`.

    Raises:
        InputError: something in the settings does not work; the message has the remedy.
    """
    _check(settings)
    with as_input_error():
        methods = [parse_method(text) for text in settings.methods] or None
    documents = read_documents(settings.text, settings.column) if settings.text else None
    pretrained = load(settings.model, settings.device)
    with as_input_error():
        adapters = {f"adapter:{Path(a).name}": hf.read_adapter(a).bounds(pretrained.model) for a in settings.adapters}
    texts, command = documents or standard_library(), as_command("plan", settings)
    return from_text(pretrained, texts, settings, methods, adapters, out, progress, command)


def from_text(
    pretrained: Pretrained,
    documents: Sequence[str],
    settings: PlanSettings,
    methods: Sequence[Method] | None,
    adapters: Mapping[str, dict[int, Bound]],
    out: Path,
    progress: Progress,
    command: str,
) -> Made:
    """Plan for a text model that is loaded, on documents that are read."""
    lengths = sorted(set(settings.lengths))
    reading = read(pretrained, documents, min(lengths), 1, settings.seed)
    start = settings.seed * 997 % max(len(reading.tokens), 1)
    turned = replace(reading, tokens=reading.tokens[start:] + reading.tokens[:start])  # other passages for other seeds
    loads = [text_load(pretrained, turned, length) for length in lengths]
    text = {"fingerprint": _mark(reading.tokens), "tokens": len(reading.tokens), "documents": reading.documents}
    facts = {"model": pretrained.facts(), "text": text, "identity": pretrained.identity()}
    return _made(loads, settings, methods, adapters, out, progress, facts, command)


def plan(
    model: Any,
    inputs: Sequence[Any],
    *,
    min_fidelity: float = 0.99,
    shift: float = 1.6,
    lengths: Sequence[int] = (512, 2048, 4096),
    loss: Loss | None = None,
    metric: Callable[[Any, Any], float] | None = None,
    methods: Sequence[str | Method] | None = None,
    minutes: float = 10.0,
    seed: int = 0,
    out: str | Path | None = None,
    progress: Progress = lambda what, done, total: None,
) -> Plan:
    """Find which method runs in which layer at which length, for an error of the final output that is accepted.

    Args:
        model: what `sq.hf.swap` takes, with its own attention in it.
        inputs: mappings of the model's keywords to tensors, five or more of each length; for a SentenceTransformer
            also texts, which are cut into passages of `lengths` tokens.
        min_fidelity: the mean fidelity (1 − loss) that the plan must have on inputs that it was not made from, above
            0 and at most 1.
        shift: how many times larger the loss may be on other inputs than on these. The plan keeps 1 − fidelity under
            (1 − `min_fidelity`) / `shift` here. 1 plans for inputs like these.
        lengths: of passages, in tokens, where inputs are texts.
        loss: from the model's output and its exact output for one input, 0 where they are the same; by default 1 −
            cosine of the mean last hidden state, or the divergence of the logits in nats.
        metric: in place of a loss, from the model's output and the input, of which more is better: such as 1.0 where
            the class is right. What is accepted is that its mean falls by at most 1 − `min_fidelity`.
        methods: what to try, by default settings of several methods that grow with the length.
        minutes: how long it may take; units that are done when the time is out are used.
        seed: of the passages that are drawn from texts.
        out: a folder from which an interrupted run resumes, and into which the plan is saved.
        progress: called with what is under way, and how much of it is done.

    Returns:
        A plan: `sq.hf.swap(model, plan)`, `plan.save(folder)`, `sq.load_plan(folder)`. Its `verified` says what was
        measured on held-out inputs. Where nothing met the floor it is exact attention at that length.

    Raises:
        ValueError: too few inputs of a length, a floor outside (0, 1], a method that is unknown.
        TypeError: no model that `swap` takes, or inputs that are neither mappings nor texts.
    """
    settings = PlanSettings(min_fidelity=min_fidelity, shift=shift, lengths=tuple(lengths), minutes=minutes, seed=seed)
    _check(settings)
    tried = None if methods is None else [resolve(method) for method in methods]
    with TemporaryDirectory() as temporary:
        folder = Path(out) if out is not None else Path(temporary)
        if inputs and all(isinstance(item, str) for item in inputs):
            pretrained = of_sentence_transformer(model)
            made = from_text(pretrained, list(inputs), settings, tried, {}, folder, progress, command="sq.plan")
        else:
            loads = input_loads(model, inputs, loss, metric)
            described = describe_model(model)
            facts = {"model": described, "text": {"inputs": len(inputs)}, "identity": described}
            made = _made(loads, settings, tried, {}, folder, progress, facts, "sq.plan")
        if out is not None:
            made.plan.save(folder, model)
            Store.clear(folder)
    return made.plan


def of_sentence_transformer(model: Any) -> Pretrained:
    """What reads texts with a SentenceTransformer: its tokenizer and pooling around its transformers model.

    Raises:
        TypeError: it is none, so that nothing says how texts are read.
    """
    inner, tokenizer = hf.transformers_model(model), getattr(model, "tokenizer", None)
    if tokenizer is None:
        raise TypeError(
            f"texts as inputs need a SentenceTransformer, which has a tokenizer; {type(model).__name__} has none: give "
            "mappings of the model's keywords to tensors"
        )
    modes = [getattr(part, "pooling_mode", None) for part in model.modules()]
    first = any(mode in ("cls", ("cls",)) for mode in modes) or any(
        getattr(part, "pooling_mode_cls_token", False) for part in model.modules()
    )
    limit = hf.position_limit(inner) or getattr(inner.config, "max_position_embeddings", None)
    return Pretrained(type(model).__name__, inner, tokenizer, "embedding", "cls" if first else "mean", limit)


def _made(
    loads: Sequence[Load],
    settings: PlanSettings,
    methods: Sequence[Method] | None,
    adapters: Mapping[str, dict[int, Bound]],
    out: Path,
    progress: Progress,
    facts: dict[str, Any],
    command: str,
) -> Made:
    with as_input_error():
        candidates = candidates_for(loads[0].model, methods, adapters)
        store = Store(out, fingerprint(loads, candidates, settings, facts))
        planning = Planning(loads, candidates, settings.min_fidelity, settings.minutes, settings.shift)
        planning.run(store, progress)
    made_on = {
        "command": command,
        "versions": machine.versions(),
        "hardware": machine.hardware(settings.device),
        "text": facts["text"],
        "resumed": store.found,
    }
    return Made(plan_of(planning, made_on), planning, facts["model"])


def fingerprint(loads: Sequence[Load], candidates: Any, settings: PlanSettings, facts: dict[str, Any]) -> Any:
    """All that the units depend on."""
    return {
        "identity": facts["identity"],
        "text": facts["text"],
        "loads": [[load.length, len(load.items), len(load.held_out)] for load in loads],
        "candidates": {str(load.length): [c.name for c in candidates(load.length)] for load in loads},
        "floor": [settings.min_fidelity, settings.shift],
        "seed": settings.seed,
        "machine": [machine.versions(), machine.hardware(settings.device)],
        "units": UNITS,
    }


def _check(settings: PlanSettings) -> None:
    if not 0.0 < settings.min_fidelity <= 1.0:
        raise InputError(f"min-fidelity {settings.min_fidelity:g} must be above 0 and at most 1")
    if not 1.0 <= settings.shift < math.inf:
        raise InputError(f"shift {settings.shift:g} must be at least 1")
    if not settings.minutes >= LEAST_MINUTES:
        raise InputError(f"minutes {settings.minutes:g} must be at least {LEAST_MINUTES:g}")
    if not settings.lengths:
        raise InputError("no lengths to plan for: --lengths names none")
    wrong = [length for length in settings.lengths if length < 16]
    if wrong:
        raise InputError(f"a length of {wrong[0]} is too short to plan for; the shortest is 16 tokens")


def _mark(tokens: Sequence[int]) -> str:
    """A mark of a text in 16 hexadecimal digits."""
    return sha256(",".join(map(str, tokens)).encode()).hexdigest()[:16]
