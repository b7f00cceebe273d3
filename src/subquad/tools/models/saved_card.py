"""The card of a model that `--save` wrote: its attention, its figures and how to load it, above its original card."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from subquad.tools.report.markup import bullets, escaped, fenced

FRONT = "---\n"
NEW_FRONT = "---\ntags: [subquad]\n---\n"


@dataclass(frozen=True)
class Measured:
    """The measurements that a command made of the attention that it saved.

    Attributes:
        lines: one for each length.
        original: the comparison with the original model on short texts; empty if there was none.
        noise: a note on how far exact attention differed from itself meanwhile; empty if that is not known.
        differing: a line for each setting of the saved model that differs from the original model's.
        closeness: sentences on the cosines of its embeddings to the original model's; empty if not measured.
    """

    lines: Sequence[str]
    command: str
    hardware: Mapping[str, Any]
    dtype: str
    original: str = ""
    noise: str = ""
    differing: Sequence[str] = ()
    closeness: Sequence[str] = ()


def saved_card(
    folder: str,
    kind: type,
    name: str,
    tokens: int,
    methods: Mapping[int, object],
    measured: Measured,
    original: str,
    note: str = "",
) -> str:
    """The README.md of a saved model: its front matter, our section, and the rest of the original card.

    Args:
        folder: its name.
        kind: the class that loads it.
        name: the attention that it runs, in words; `methods` are those of its layers.
        tokens: the longest inputs on which it was measured.
        original: the card of the model that it was made from; empty if it has none.
        note: a note on inputs that are longer than the model's own positions; empty if it reads none.
    """
    front, body = _parted(original)
    machine = ", ".join(f"{key} {value}" for key, value in {**measured.hardware, "dtype": measured.dtype}.items())
    parts = [
        f"# {escaped(folder)}: a model with sub-quadratic attention",
        f"The weights are those of the model whose card follows. It runs {escaped(name)}, which was measured on "
        f"inputs of up to {tokens:,} tokens:",
        _by_method(methods),
        *_differences(measured),
        fenced(_load(folder, kind), "python"),
        "`subquad.hf.restore(model)` gives it its own exact attention again.",
        "Measured against exact attention (torch's SDPA) in the same run:",
        bullets(measured.lines),
        *(escaped(text) for text in (measured.noise, measured.original, note) if text),
        fenced(measured.command),
        escaped(machine),
        "---",
        body.strip() or "The original model has no card.",
    ]
    return f"{front}\n" + "\n\n".join(parts) + "\n"


def _differences(measured: Measured) -> list[str]:
    """The settings in which the saved model differs from the original, and how close its embeddings are."""
    same = "All settings are those of the original model, whose card follows."
    head = "These settings differ from those of the original model, whose card follows as it was:"
    settings = [head, bullets(measured.differing)] if measured.differing else [same]
    return [*settings, *map(escaped, measured.closeness)]


def _by_method(methods: Mapping[int, object]) -> str:
    """A bullet for each method, with its layers."""
    layers: dict[str, list[str]] = {}
    for number, method in sorted(methods.items()):
        layers.setdefault(str(method), []).append(str(number))
    lines = {method: f"layer{'s' * (len(those) > 1)} {', '.join(those)}" for method, those in layers.items()}
    return "\n".join(f"- `{method}` in {where}" for method, where in lines.items())


def _load(folder: str, kind: type) -> str:
    """Three lines that load the model."""
    package = kind.__module__.partition(".")[0]
    module, ours = (
        ("subquad.research.training.models", "") if package == "subquad" else (package, "import subquad.hf\n")
    )
    loader = "" if module == "sentence_transformers" else ".from_pretrained"
    return f"{ours}from {module} import {kind.__name__}\n\nmodel = {kind.__name__}{loader}({json.dumps(folder)})"


def _parted(card: str) -> tuple[str, str]:
    """The front matter of a card, and what follows it."""
    if card.startswith(FRONT) and (end := card.find(f"\n{FRONT}", len(FRONT) - 1)) >= 0:
        end += len(f"\n{FRONT}")
        return card[:end], card[end:]
    return NEW_FRONT, card
