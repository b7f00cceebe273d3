"""Ablation of clustered attention in a pretrained encoder, without training: clusters, tail and cells.

    python benchmarks/cluster_quality.py [--text PATH --text …] [--length 512] [--items 24]
                                         [--methods METHOD --methods …] [--adapter ADAPTER]

Prints for each method the mean cosine of final embeddings to those of exact attention, over all items, and the relative
error of the attention layers' outputs on the longest one, as the mean of the layers. Rows called "keys alone" make the
cells from keys alone; all others see keys and values. With the adapter of an `lha-tail`, which `subquad calibrate`
makes, it is measured both ways, too: its fit does not depend on the cells.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated
from unittest.mock import patch

import sheet
import torch
import typer

from subquad import Full, hf
from subquad.kernels.dispatch import use_backend
from subquad.kernels.selection.cells import reference
from subquad.methods import parse_method
from subquad.tools.data.texts import read_documents, standard_library
from subquad.tools.measure.capture import LayerInputs, recorded
from subquad.tools.measure.fidelity import cosine, relative_error
from subquad.tools.models.passages import read
from subquad.tools.models.pretrained import Pretrained, load, running
from subquad.tools.runs import machine

ROWS = [
    *("i-clustered", "i-clustered:refine=1", "i-clustered:refine=2", "i-clustered:refine=8"),
    *(f"i-clustered:space=logits,refine={rounds}" for rounds in (0, 1, 2, 8)),
    *(f"i-clustered:clusters=128,topk=64{more}" for more in ("", ",space=logits,refine=2")),
    *(f"clustered-tail:clusters=128,topk=64,cells={cells}" for cells in (1, 8, 16)),
    "clustered-tail:clusters=128,topk=64,cells=16 (keys alone)",
]
FITTED, ALONE = "adapter", " (keys alone)"


@contextmanager
def cells_of_keys_alone() -> Iterator[None]:
    """Values are zeros where cells are made; in plain PyTorch, because compiled code makes them by itself."""
    made = reference.key_cells

    def of_keys(key, value, valid, **settings):
        return made(key, torch.zeros_like(value), valid, **settings)

    with use_backend("reference"), patch.object(reference, "key_cells", of_keys):
        yield


def measured(
    row: str,
    pretrained: Pretrained,
    items: Sequence[list[int]],
    exact: torch.Tensor,
    calls: Sequence[LayerInputs],
    adapter: Path | None,
) -> tuple[float, float]:
    """Mean cosine of embeddings, and mean relative error of the layers' outputs."""
    name = row.removesuffix(ALONE)
    if name == FITTED:
        methods = hf.read_adapter(adapter).bounds(pretrained.model)
    else:
        methods = {call.number: parse_method(name) for call in calls}
    with cells_of_keys_alone() if row.endswith(ALONE) else nullcontext():
        errors = [float(relative_error(call.run(methods[call.number]), call.run(Full()))) for call in calls]
        with running(pretrained.model, methods):
            embedded = torch.cat([pretrained.embed([item]) for item in items])
    return float(cosine(embedded, exact).mean()), sum(errors) / len(errors)


@torch.no_grad()
def main(
    text: Annotated[list[Path] | None, typer.Option(help="a file or folder; repeatable")] = None,
    length: int = 512,
    items: int = 24,
    methods: Annotated[list[str] | None, typer.Option(help="a row of the table; repeatable")] = None,
    adapter: Path | None = None,
) -> None:
    pretrained = load(None)
    documents = read_documents(text) if text else standard_library()
    passages = read(pretrained, documents, length, items, seed=0).passages
    exact = torch.cat([pretrained.embed([item]) for item in passages])
    longest = max(passages, key=len)
    with recorded(pretrained.model) as calls:
        pretrained.forward([longest])
    print(f"{len(passages)} passages, {sum(map(len, passages)) / len(passages):.0f} tokens each; {machine.versions()}")
    print(f"{'':<58}{'cosine':>10}{'error':>10}")
    for row in [*(methods or ROWS), *([FITTED, FITTED + ALONE] if adapter else [])]:
        near, error = measured(row, pretrained, passages, exact, calls, adapter)
        print(f"{row:<58}{near:>10.4f}{error:>10.4f}", flush=True)


if __name__ == "__main__":
    sheet.run(main)
