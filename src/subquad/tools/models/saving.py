"""`--save`: the model with the attention that was chosen, in a folder that loads with it."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from subquad import hf
from subquad.core import files
from subquad.core.errors import InputError, as_input_error
from subquad.core.reading import exists, read_bytes
from subquad.hf.model_files import (
    called,
    from_pretrained,
    is_sentence_transformer,
    optional_file,
    read_tokenizer,
)
from subquad.hf.plans import joined, load_plan
from subquad.hf.reattaching import ADAPTER
from subquad.hf.swapping import record
from subquad.methods import BoundMethod, Full, Method
from subquad.tools.compare import run as compare
from subquad.tools.compare.attachment import described, running_at
from subquad.tools.compare.recommend import describe_performance
from subquad.tools.models.dtypes import TORCH
from subquad.tools.models.longer import short_note
from subquad.tools.models.model_types import class_of
from subquad.tools.models.pretrained import architecture_of, config_of, load, model_location
from subquad.tools.models.rows import CompareRow
from subquad.tools.models.saved_card import Measured, saved_card
from subquad.tools.report.schema import Report
from subquad.tools.runs.settings import CompareSettings, PlanSettings

CARD = "README.md"
EAGER = {"attn_implementation": "eager"}  # a swap that the folder records is not what the user asks about


@dataclass(frozen=True)
class Chosen:
    """What is to run in the layers of a model, at which lengths it is recommended, and what was measured of it."""

    name: str
    methods: Mapping[int, Method | BoundMethod]
    lengths: Sequence[int]
    measured: Measured
    dtype: torch.dtype | None = None  # of the weights; None: as they are
    recorded: Mapping[str, Any] = field(default_factory=dict)  # of a plan: what `swap` records of it

    @property
    def tokens(self) -> int:
        """The longest length at which it is recommended, which the model's positions are to reach."""
        return max(self.lengths)


def check(folder: Path | None, out: Path, model: str | None) -> None:
    """Refuse, before anything is measured, what could not be saved; without a folder nothing is to be saved.

    Raises:
        InputError: the folder is not empty or contains `out`; no such model, or one that sentence-transformers,
            which is not installed, must save.
    """
    if folder is None:
        return
    if exists(folder) and not folder.is_dir():
        raise InputError(f"--save {folder} is a file; give a folder")
    _check_empty(folder)
    if out.resolve().is_relative_to(folder.resolve()):
        raise InputError(f"--save {folder} must not be the folder of --out ({out}) or one around it")
    where = model_location(model)
    config_of(where)
    if is_sentence_transformer(where):
        _sentence_transformer_class(where)


def chosen_by_comparison(settings: CompareSettings, report: Report, out: Path) -> Chosen | None:
    """The methods that a comparison recommends, each from its length on; None where exact attention in fp32 stays.

    The model is to read the longest inputs at which one is recommended.
    """
    attached = report["recommendation"].get("attachment")
    if attached is None:
        return None
    c = compare.prepare(settings, out)  # what was fitted is in the folder
    names = {int(start): name for start, name in attached["steps"].items()}
    rows = {row.name: row for row in c.rows}
    reports = {method["method"]: method for method in report["methods"]}
    lines = [
        f"{n:,} tokens: {describe_performance(reports[running_at(names, n)], str(n), c.floor)}."
        for n in attached["lengths"]
    ]
    measured = Measured(lines, report["command"], report["hardware"], attached["dtype"], noise=report["noise"]["says"])
    methods = _by_layer({start: rows[name] for start, name in names.items()}, c.pretrained.model)
    return Chosen(described(attached), methods, attached["lengths"], measured, TORCH[attached["dtype"]])


def chosen_by_plan(settings: PlanSettings, out: Path) -> Chosen | None:
    """The methods of the plan in a folder, and the longest length at which it is not exact attention, or None.

    Raises:
        InputError: what is in the folder is not a plan for the model.
    """
    with as_input_error():
        plan = load_plan(out)
        lengths = [int(length) for length, verified in plan.verified.items() if "exact_because" not in verified]
        if not lengths:
            return None
        made, dtype = plan.made_on, str(plan.model["dtype"]).removeprefix("torch.")
        lines = [
            f"{n:,} tokens: {plan.description(n)}, on {plan.verified[str(n)]['passages']} passages." for n in lengths
        ]
        short = made.get("short_texts")
        measured = Measured(lines, made["command"], made["hardware"], dtype, short_note(short) if short else "")
        methods = plan.for_model(load(settings.model, settings.device).model)
        return Chosen("the plan", methods, lengths, measured, recorded=plan.recorded)


def save(chosen: Chosen | None, model: str | None, folder: Path | None) -> int | None:
    """Write the model with the chosen methods, its positions long enough, as its own library does.

    Returns how many tokens the saved model accepts; None if there is no limit. Nothing is written if nothing was chosen
    or no folder is given. A SentenceTransformer stays one. Learned parameters are written as an adapter inside of the
    folder.

    Raises:
        InputError: the folder was filled meanwhile, or a layer cannot run its method.
    """
    if chosen is None or folder is None:
        return None
    _check_empty(folder)
    where = model_location(model)
    loaded, tokenizer = _loaded(where)
    loaded = loaded if chosen.dtype is None else loaded.to(chosen.dtype)
    methods = {
        n: copy.deepcopy(each).cpu() if isinstance(each, BoundMethod) else each for n, each in chosen.methods.items()
    }
    with as_input_error():
        reach = hf.position_limit(loaded)
        read = [getattr(tokenizer, "model_max_length", None), getattr(loaded, "max_seq_length", None), reach]
        if reach is None or chosen.tokens > min(limit for limit in read if limit is not None):
            hf.extend_positions(loaded, chosen.tokens, tokenizer=tokenizer)
        hf.swap(loaded, methods, max_length=hf.position_limit(loaded) or chosen.tokens)
        record(loaded, **chosen.recorded)
    with files.whole_folder(folder) as part:
        loaded.save_pretrained(str(part))
        if tokenizer is not None:
            tokenizer.save_pretrained(str(part))
        if any(bound.learned is not None for bound in hf.bounds(loaded).values()):
            hf.save_adapter(loaded, part / ADAPTER)
        limit = reach if reach is not None and reach < chosen.tokens else None
        _write_card(part / CARD, _card_of(where), folder.resolve().name, loaded, chosen, limit)
    positions = getattr(hf.transformers_model(loaded).config, "max_position_embeddings", None)
    accepted: int | None = getattr(loaded, "max_seq_length", None) or hf.position_limit(loaded) or positions
    return accepted


def _card_of(where: str) -> str:
    """The card of the original model; empty if it has none."""
    file = optional_file(where, CARD)
    return "" if file is None else read_bytes(file).decode("utf-8", errors="replace")


def _write_card(path: Path, original: str, folder: str, loaded: Any, chosen: Chosen, limit: int | None) -> None:
    """Our section above the card that the model's own library wrote, or above the original one."""
    original = path.read_text("utf-8") if path.exists() else original
    runs = hf.describe(loaded).methods
    card = saved_card(folder, type(loaded), chosen.name, chosen.tokens, runs, chosen.measured, original, limit)
    files.write(path, card)


def _check_empty(folder: Path) -> None:
    if not files.empty_but_for(folder):
        raise InputError(f"--save {folder}: the folder is not empty; give a new or an empty one")


def _by_layer(steps: Mapping[int, CompareRow], model: Any) -> dict[int, Method | BoundMethod]:
    """The methods of each layer from their numbers of tokens on; a layer that a row leaves out is exact there."""
    layers = {layer.number: layer for layer in hf.find_layers(model)}
    numbers = sorted({number for row in steps.values() for number in row.layers})
    if len(steps) == 1:
        return {number: steps[0].at(number) for number in numbers}
    methods: dict[int, Method | BoundMethod] = {}
    for number in numbers:
        each = {start: row.at(number) if number in row.layers else Full() for start, row in steps.items()}
        method, bound = joined(layers[number], each)
        methods[number] = method if bound is None else bound
    return methods


def _loaded(where: str) -> tuple[Any, Any]:
    """The model with its own attention, and its tokenizer where it does not hold it itself."""
    if is_sentence_transformer(where):
        loaded = called(_sentence_transformer_class(where), where, model_kwargs=EAGER, device="cpu")
    else:
        loaded = from_pretrained(_class_of(where), where, **EAGER)
    inner = hf.transformers_model(loaded.eval())
    hf.restore(inner)
    inner.set_attn_implementation("sdpa" if inner._supports_sdpa else "eager")
    return loaded, None if loaded is not inner else read_tokenizer(where)


def _class_of(where: str) -> Any:
    """The class of a model that its config names, with all of its heads; else the one without any."""
    import transformers

    model_class = class_of(architecture_of(config_of(where)))
    return model_class if hasattr(model_class, "from_pretrained") else transformers.AutoModel


def _sentence_transformer_class(where: str) -> Any:
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError:
        raise InputError(
            f"{where} is a SentenceTransformer, and --save needs sentence-transformers, which is not installed: pip "
            "install sentence-transformers"
        ) from None
    return SentenceTransformer
