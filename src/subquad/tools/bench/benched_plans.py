"""The methods of plans in `subquad bench`, at the shapes of the models they are for."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from subquad.core.errors import InputError, as_input_error
from subquad.tools.bench.settings import BENCHED, BenchSettings

if TYPE_CHECKING:
    from subquad.hf.plans import Plan

HEADS, HEAD_DIM = 6, 64  # if neither the user nor a plan sets them


def resolved(settings: BenchSettings) -> BenchSettings:
    """The settings with the plans' methods, heads and width of heads in them, in place of the plans.

    Raises:
        InputError: there is no such plan, it is exact attention everywhere, or the plans' models have several shapes
            and none is chosen.
    """
    plans = _read(settings.plans) if settings.plans else {}
    for folder, plan in plans.items():
        if not plan.distinct:
            raise InputError(f"the plan {folder} is exact attention in every layer: there is nothing to measure")
    shapes = sorted({(heads, width) for plan in plans.values() for heads, _, width in plan.model["layers"]})
    if len(shapes) > 1 and (settings.heads is None or settings.head_dim is None):
        listed = " and ".join(f"{heads} heads of width {width}" for heads, width in shapes[:5])
        raise InputError(f"the layers that the plans are for have {listed}: choose with --heads and --head-dim")
    heads, width = shapes[0] if shapes else (HEADS, HEAD_DIM)
    compared = () if plans and settings.methods == BENCHED else settings.methods
    planned = (str(method) for plan in plans.values() for method in plan.distinct)
    return replace(
        settings,
        methods=tuple(dict.fromkeys((*compared, *planned))),
        plans=(),
        heads=heads if settings.heads is None else settings.heads,
        head_dim=width if settings.head_dim is None else settings.head_dim,
        kv_heads=_kv_heads(settings, heads),
    )


def _kv_heads(settings: BenchSettings, heads: int) -> int | None:
    """The key heads of steps: as many as query heads, unless they are named."""
    if not settings.steps or settings.kv_heads is not None:
        return settings.kv_heads
    return heads if settings.heads is None else settings.heads


def _read(folders: tuple[Path, ...]) -> "dict[Path, Plan]":
    """The plans in these folders."""
    try:
        from subquad.hf.plans import load_plan
    except ImportError as error:  # without plans, no transformers is needed
        raise InputError(str(error)) from None
    with as_input_error():
        return {folder: load_plan(folder) for folder in folders}
