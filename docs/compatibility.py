"""The tables of docs/methods.md and docs/compatibility.md: from traits, ops and what the tests name."""

from collections.abc import Callable, Iterable
from unittest.mock import patch

import torch
from tests.library.test_exits import NOT_COMPILED_ONCE, NOT_EVERY_LENGTH

import subquad as sq
from subquad.kernels.dispatch import Op
from subquad.methods.core.traits import FAMILIES

FAMILY = {
    "exact": "Exact: all N·M weights",
    "clusters": "Clusters: queries that are alike share work",
    "buckets": "Buckets: a query attends to the keys of its buckets",
    "window": "Windows and patterns: which keys a query attends to follows from where they stand",
    "features": "Features: sums over feature maps in place of the softmax",
    "summary": "Summaries: few rows stand for all keys",
    "mixture": "Mixtures: several methods in one",
}

NEEDS: dict[str, Callable[[sq.Traits], bool]] = {
    "causal masks": lambda t: t.causal == "strict",
    "causal masks as to values alone: the choice of keys may see the future": lambda t: t.causal == "values-only",
    "decoding from a state of fixed size": lambda t: t.recurrent,
    "cross-attention": lambda t: t.cross,
    "windows (`Mask.window`)": lambda t: t.window,
    "dense masks and an additive bias": lambda t: t.dense_mask and t.bias,
    "no learned parameters": lambda t: not t.learned,
    "learned parameters that `subquad calibrate` fits to a frozen model": lambda t: t.fit is not None,
    "exact attention as a limit of the settings": lambda t: not isinstance(t.exact_limit, str),
    "the same output for every seed": lambda t: not t.stochastic,
    "kept tokens and merged parts (`keep=`, `return_lse=True`)": lambda t: t.lse,
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


def families() -> str:
    """A section for each family with one row per method: what it does, whether it learns, and its source."""
    parts = []
    for family in FAMILIES:
        rows = (
            (page(name), summary(method), "yes" if method.traits.learned else "no", method.traits.source)
            for name, method in sq.METHODS.items()
            if method.traits.family == family
        )
        parts.append(f"### {FAMILY[family]}\n\n{table(('method', '', 'learned parameters', 'source'), rows)}")
    return "\n\n".join(parts)


def summary(method: type[sq.Method]) -> str:
    """The first paragraph of a method's docstring."""
    return " ".join((method.__doc__ or "").partition("\n\n")[0].split()).replace("|", "\\|")


def chooser() -> str:
    """One row per need, with the sub-quadratic methods that meet it."""
    able = [(name, method.traits) for name, method in sq.METHODS.items() if not method.traits.quadratic_baseline]
    rows = ((need, ", ".join(page(name) for name, t in able if meets(t)) or "none") for need, meets in NEEDS.items())
    return table(("you need", "methods"), rows)


def masks() -> str:
    """What each method takes: masks, other keys, a bias, and whether it decodes."""
    header = "method", "causal", "window", "dense", "bias", "cross-attention", "cached steps", "fixed state", "`keep=`"
    causal = {"strict": "✓", "values-only": "values only", "no": "–"}
    rows = []
    for name, method in sq.METHODS.items():
        t = method.traits
        steps = (t.cached or t.cross) and (t.by_halves or t.causal == "strict")
        flags = t.window, t.dense_mask, t.bias, t.cross, steps, t.recurrent, t.lse
        rows.append((page(name), causal[t.causal], *map(tick, flags)))
    return table(header, rows)


def programs() -> str:
    """What each method can be differentiated by, compiled to, exported to, and which of its ops have kernels."""
    header = "method", "gradients of", "torch.compile", "torch.export", "compiled on the CPU"
    rows = (
        (page(name), gradients(method.traits), compiled(name), exported(name), kernels(method))
        for name, method in sq.METHODS.items()
    )
    return table(header, rows)


def gradients(traits: sq.Traits) -> str:
    """What has a gradient."""
    return "q, k, v" + ", bias" * traits.bias + ", parameters" * traits.learned


def compiled(name: str) -> str:
    """Whether one compiled program serves all lengths."""
    why = NOT_COMPILED_ONCE.get(name)
    return "once for all lengths" if why is None else f"per length ({why})"


def exported(name: str) -> str:
    """The lengths that an exported program takes."""
    return NOT_EVERY_LENGTH[name][1] if name in NOT_EVERY_LENGTH else "all lengths"


def kernels(method: type[sq.Method]) -> str:
    """The ops of a method that have a compiled backend."""
    runs = [ops_of(method, is_causal=False)]
    if method.traits.causal != "no":
        runs.append(ops_of(method, is_causal=True))
    always = [op for op in runs[0] if op in runs[-1] or method.traits.by_halves]
    causal = [op for op in runs[-1] if op not in runs[0]]
    words = [f"`{op}`" for op in always] + [f"`{op}` (causal)" for op in causal]
    return ", ".join(words) or "none: plain PyTorch"


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
    with patch.object(Op, "__call__", call), torch.no_grad():
        layer(q, k, v, is_causal=is_causal)
    return list(dict.fromkeys(names))
