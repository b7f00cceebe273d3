"""The tables of docs/methods.md: from the traits of the methods, their pages, and the ops that they run."""

from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from unittest.mock import patch

import torch

import subquad as sq
from subquad.kernels.dispatch import Op

PAGES = Path(__file__).parent / "methods"
CAUSAL = {"strict": "yes", "values-only": "values only", "no": "no"}

# The settings with which methods that take quadratic time at their defaults take less.
SUBQUADRATIC_WITH = {
    "lha": "buckets=0,bucket_size=128",
    "lsh": "buckets=0,bucket_size=128",
    "mixed-heads": "methods=local+lha:buckets=0;bucket_size=128",
    "routing": "cluster_size=128",
    "sinkhorn": "cut=2",
    "smyrf": "cluster_size=128",
}


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    header = list(header)
    lines = [header, ["---"] * len(header), *map(list, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def tick(flag: bool) -> str:
    """A truth value as a sign."""
    return "✓" if flag else "–"


def page(name: str) -> str:
    """A link to a method's page from a page of docs/."""
    return f"[`{name}`](methods/{name}.md)"


def when(name: str) -> str:
    """The first line below "When to use it" of a method's page, which is one sentence without links."""
    text = (PAGES / f"{name}.md").read_text("utf-8")
    return text.partition("## When to use it\n\n")[2].partition("\n")[0]


def uses() -> str:
    """A table of when to use each method, and of what it costs."""
    header = "method", "family", "when to use it", "training", "sub-quadratic", "causal", "cost"
    rows = (
        (
            page(name),
            method.traits.family,
            when(name),
            training(method.traits, when(name)),
            subquadratic(name, method.traits),
            CAUSAL[method.traits.causal],
            cost(method.traits),
        )
        for name, method in sq.METHODS.items()
    )
    return table(header, rows)


def training(traits: sq.Traits, use: str) -> str:
    """The training that a pretrained model needs before a method can replace its attention."""
    if traits.family == "mixture":
        return "as its parts"
    if traits.fit and "fitting" in use:
        return "calibration"
    if traits.learned or "trained with it" in use or isinstance(traits.exact_limit, str):
        return "yes, or calibration" if traits.fit else "yes"
    return "none"


def subquadratic(name: str, traits: sq.Traits) -> str:
    """Tell whether the time at default settings grows more slowly than N·M, and if not, with which settings it does."""
    if traits.subquadratic:
        return "yes"
    return f"no (yes with `{SUBQUADRATIC_WITH[name]}`)" if name in SUBQUADRATIC_WITH else "no"


def cost(traits: sq.Traits) -> str:
    """Time and memory of a method."""
    return "as its parts" if traits.family == "mixture" else traits.complexity


def supports() -> str:
    """A table of what methods support: other keys, masks, a bias, decoding; their exact limits; and compiled ops."""
    header = "method", "cross-attention", "window", "dense mask", "bias", "cached steps", "fixed state", "`keep=`"
    rows = (
        (page(name), *map(tick, flags(method.traits)), exact_when(method), kernels(method))
        for name, method in sq.METHODS.items()
    )
    return table((*header, "exact when", "compiled on the CPU"), rows)


def flags(traits: sq.Traits) -> tuple[bool, ...]:
    """The columns of `supports` that are true or false."""
    steps = (traits.cached or traits.cross) and (traits.by_halves or traits.causal == "strict")
    return traits.cross, traits.window, traits.dense_mask, traits.bias, steps, traits.recurrent, traits.lse


def exact_when(method: type[sq.Method]) -> str:
    """The settings at which a method equals exact attention."""
    traits = method.traits
    if not isinstance(traits.exact_limit, Mapping):
        return "as its parts" if traits.family == "mixture" else "never"
    limits = traits.exact_limit.items()
    when = " and ".join(f"`{name}` {'=' if isinstance(n, int) else '≥'} {n}" for name, n in limits) or "always"
    return f"{when}, unless `{never}`" if (never := never_exact(method)) else when


def never_exact(method: type[sq.Method]) -> str | None:
    """The setting with which a method that has an exact limit has none: learned terms of the distance."""
    positions = next((field for field in fields(method) if field.name == "positions"), None)
    if positions is None or "relative" not in positions.metadata["choices"]:
        return None
    assert isinstance(method.from_settings({"positions": "relative"}).traits.exact_limit, str)
    return "positions=relative"


def kernels(method: type[sq.Method]) -> str:
    """The ops of a method that have a compiled backend."""
    runs = [ops_of(method, is_causal=False)]
    if method.traits.causal != "no":
        runs.append(ops_of(method, is_causal=True))
    always = [op for op in runs[0] if op in runs[-1] or method.traits.by_halves]
    causal = [op for op in runs[-1] if op not in runs[0]]
    words = [f"`{op}`" for op in always] + [f"`{op}` (causal)" for op in causal]
    return ", ".join(words) or "none"


def ops_of(method: type[sq.Method], *, is_causal: bool) -> list[str]:
    """The ops with a compiled backend that one small call of a method runs, less those inside of others."""
    names: list[str] = []
    inside = 0

    def call(op: Op, *args: object, **kwargs: object) -> object:
        nonlocal inside
        if op._refusals and not inside:
            names.append(op.__name__)
        inside += 1
        try:
            return op.reference(*args, **kwargs)
        finally:
            inside -= 1

    layer = method.from_settings(dict(method.traits.example)).bind(heads=2, head_dim=8, max_length=64).eval()
    q, k, v = torch.randn(3, 1, 2, 50, 8, generator=torch.Generator().manual_seed(0))
    # The blocks of this call stand for longer ones, which are too long for the kernel of few queries.
    with patch.object(Op, "__call__", call), patch.object(Op, "if_taken", lambda *_, **__: None), torch.no_grad():
        layer(q, k, v, is_causal=is_causal)
    return list(dict.fromkeys(names))
