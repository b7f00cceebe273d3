"""Methods in a model whose tokens are split over the processes of a group: what they send, and what is refused."""

from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import replace
from pathlib import Path

from subquad import hf
from subquad.core.errors import InputError
from subquad.distributed import Sequence
from subquad.distributed.run import refusal_of_method, way_of_method
from subquad.masks import Mask
from subquad.methods import BoundMethod, Method
from subquad.tools.measure.group import MeasuringGroup
from subquad.tools.models.compare_rows import CompareRow
from subquad.tools.models.pretrained import Pretrained

_SENT = {"summary": "summaries of their keys", "heads": "all tokens, by heads", "ring": "keys and values, in a ring"}


def split(row: CompareRow, pretrained: Pretrained) -> CompareRow:
    """The row with what its layers send where tokens are split over ranks; without layers where they refuse that."""
    modes = set()
    for layer in hf.find_layers(pretrained.model):
        if pretrained.group.ranks is None or layer.number not in row.layers:
            continue
        reason, mode = split_of(layer, row.at(layer.number), pretrained.group.ranks.even(pretrained.group.count))
        if reason is not None:
            return replace(row, layers=[], reason=reason)
        modes.add(mode)
    return replace(row, modes=tuple(sorted(modes)))


def split_refusals(layers: Iterable[hf.Layer], method: Method, group: MeasuringGroup) -> dict[int, str]:
    """The layers that cannot run the method on tokens that are split over a group, with the reasons."""
    if group.ranks is None:
        return {}
    reasons = {layer.number: split_of(layer, method, group.ranks.even(group.count))[0] for layer in layers}
    return {number: reason for number, reason in reasons.items() if reason}


def split_of(layer: hf.Layer, configured: Method | BoundMethod, sequence: Sequence) -> tuple[str | None, str]:
    """The reason why a method cannot run in this layer on split tokens, None if it can, and what its ranks send."""
    method, learned = (
        (configured.method, configured.learned) if isinstance(configured, BoundMethod) else (configured, None)
    )
    mask = Mask.causal() if layer.causal else Mask()
    mask = mask if layer.window is None else mask & Mask.window(layer.window)
    heads, _, _ = hf.head_counts(layer)
    return refusal_of_method(method, mask, sequence, heads, learned), way_of_method(method, mask, sequence, heads)


def what_is_sent(modes: Iterable[str]) -> str:
    """A remark on what the ranks of a method send each other."""
    return f"its ranks exchange {' and '.join(_SENT[mode] for mode in modes)}"


def split_note(ranks: int) -> str:
    """A note on the figures of several ranks."""
    return (
        f"The tokens of each input are split over {ranks} ranks, exact attention's too. Qualities and errors are those "
        "of the whole input; a time is that of the slowest rank, and memory that of the rank that took most."
    )


def check_not_fitted(text: Many[Path], group: MeasuringGroup) -> None:
    """InputError where several processes are asked to fit."""
    if text and group.count > 1:
        raise InputError(
            f"--calibrate {text[0]} fits in one process, but there are {group.count}: run subquad calibrate first, "
            "without torchrun, and give its folder with --adapter"
        )
