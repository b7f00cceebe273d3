"""Python that loads a model with the methods that a comparison recommends, ready to run."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from subquad.tools.compare.recommend import is_full
from subquad.tools.compare.schema import Attachment, MethodReport
from subquad.tools.models import demo
from subquad.tools.models.compare_rows import IN
from subquad.tools.models.dtypes import TORCH

AUTO_CLASSES = {"embedding": "AutoModel", "masked-lm": "AutoModelForMaskedLM", "causal-lm": "AutoModelForCausalLM"}
SAVED = "served"  # an example of a folder


def code_of(
    attached: Attachment, methods: Sequence[MethodReport], model: Mapping[str, Any], location: str | None
) -> str:
    """Lines that load the model and its tokenizer, extend its positions and attach the methods.

    If several lengths have learned parameters of their own, or methods in different layers, the lines load the folder
    that `--save` writes.

    Args:
        attached: what runs at which length.
        methods: the rows of the report.
        model: the description of the model in the report.
        location: the hub id or the folder of the model, or the name of a demo model; None is the demo encoder.
    """
    by_name = {row.method: row for row in methods}
    steps = {int(start): by_name[name] for start, name in attached.steps.items()}
    wrapped = model.get("library") == "sentence-transformers"
    auto = AUTO_CLASSES[model["kind"]]
    imported = (
        "from sentence_transformers import SentenceTransformer"
        if wrapped
        else f"from transformers import {auto}, AutoTokenizer"
    )
    if not _is_one_method(steps):
        return "\n".join([
            f"# The command with --save {SAVED} writes this model, whose parameters or layers differ by length.",
            *(("import subquad.hf", imported) if not wrapped else (imported, "import subquad.hf")),
            "",
            *_loading(wrapped, auto, f'"{SAVED}"'),
        ])  # fmt: skip
    longest, limit = max(attached.lengths), model["position_limit"]
    calls = []
    if limit is not None and longest > limit:
        reach = model.get("extended_to", longest)
        calls.append(f"sq.hf.extend_positions(model, {reach}{'' if wrapped else ', tokenizer=tokenizer'})")
    calls += _attaching(steps, len(model["layers"]))
    ours = ["import subquad as sq"] if calls else []
    lines = ["import torch", *((imported, *ours) if wrapped else (*ours, imported))]
    if location in (None, *demo.NAMES):
        lines += ["from subquad.tools.models import demo", "", f"path = {_DEMOS[location or demo.ENCODER]}"]
    else:
        lines += ["", f"path = {json.dumps(location, ensure_ascii=False)}"]
    return "\n".join([*lines, *_loading(wrapped, auto, "path", str(TORCH[attached.dtype])), *calls])


def _loading(wrapped: bool, auto: str, path: str, dtype: str | None = None) -> list[str]:
    """The lines that load the model, and its tokenizer if it does not contain it."""
    if wrapped:
        options = "" if dtype is None else f', model_kwargs={{"dtype": {dtype}}}'
        return [f"model = SentenceTransformer({path}{options})"]
    options = "" if dtype is None else f", dtype={dtype}"
    return [
        f"tokenizer = AutoTokenizer.from_pretrained({path})",
        f"model = {auto}.from_pretrained({path}{options})",
    ]


_DEMOS = {demo.ENCODER: "demo.encoder()", demo.DECODER: "demo.decoder()"}


def _is_one_method(steps: Mapping[int, MethodReport]) -> bool:
    """True if the steps can be written as one method in some layers."""
    if len(steps) == 1:
        return True
    layers = {tuple(row.layers or ()) for row in steps.values() if not is_full(row)}
    return len(layers) == 1 and not any(row.adapter for row in steps.values())


def _attaching(steps: Mapping[int, MethodReport], layers: int) -> list[str]:
    """The call that attaches the methods; none for the model's own attention."""
    rows = list(steps.values())
    if all(map(is_full, rows)):
        return []
    if rows[0].adapter:
        return [f"sq.hf.load_adapter(model, {json.dumps(rows[0].adapter, ensure_ascii=False)})"]
    if rows[0].plan:
        return [f"sq.hf.swap(model, sq.load_plan({json.dumps(rows[0].plan, ensure_ascii=False)}))"]
    names = {start: json.dumps(row.method.partition(IN)[0], ensure_ascii=False) for start, row in steps.items()}
    method = names[0]
    if len(names) > 1:
        method = f"sq.ByLength({{{', '.join(f'{start}: {name}' for start, name in names.items())}}})"
    where = next(row.layers or [] for row in rows if not is_full(row))
    return [f"sq.hf.swap(model, {method if len(where) == layers else f'dict.fromkeys({where}, {method})'})"]
