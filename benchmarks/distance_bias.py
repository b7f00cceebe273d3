"""The loss of `clustered-tail` if it had a bias of distance, as MPNet and T5 add one to their logits.

    python benchmarks/distance_bias.py BOOK [--model FOLDER] [--lengths "512 2048"] [--windows "0 16 32 64 128"]
                                       [--layers "2 6 10"] [--out FILE]

The model is all-mpnet-base-v2 by default, from PyPI (`mpnet_base.py`), whose positions are stretched beyond 512 tokens.
Its queries, keys and values are those of one passage, with exact attention in every layer.

In `clustered-tail` each query i gives each key j a weight: e^{s_ij} to an exact key, e^{r_ij} to a key of a cell, with
s_ij = scale·q_i·k_j and r_ij = scale·q̄·k_j + scale·(q_i − q̄)·k̄_x. So all of it is a dense matrix of logits here, in
plain PyTorch, to which a bias b(j − i) is added in several ways. Keys at most `window` from the query are exact, and
have their own bias. The others:

    near    have all the same, that of far keys: softmax does not see it, and nothing but the window is new
    top     the same, but the cluster's exact keys have their own
    mean    exact keys have their own, and those of a cell ln Σ e^{b(j − i)} / n over its n keys that are not near
    own     all have their own, which no cell could know: the limit

The figures are relative errors of a layer's output to that of exact attention with the same logits: ‖out − exact‖ /
‖exact‖, as the mean over layers. "No bias" is `clustered-tail` as it is, to exact attention without a bias, of the same
queries, keys and values.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import mpnet_base
import sheet
import torch
import typer
from torch import Tensor

from subquad import hf
from subquad.kernels.attention.tail.reference import exact_keys_and_cells
from subquad.kernels.selection.cells.op import key_cells
from subquad.kernels.selection.clusters.op import query_clusters
from subquad.kernels.selection.group_means import broadcast
from subquad.methods.clustered_tail import ClusteredTail, root
from subquad.tools.data.texts import read_documents
from subquad.tools.measure.capture import LayerInputs, recorded
from subquad.tools.models.pretrained import Pretrained, load

ABOUT = """One passage of a novel in all-mpnet-base-v2; its positions are interpolated beyond 512 tokens.
Relative error of the attention's output, mean of layers; in brackets, its ratio to that without a window and a bias.
`near`: the bias of keys outside the window is constant.
`top`: exact keys have their own bias.
`mean`: a cell has the mean bias of its keys, too.
`own`: each key has its own bias, which no cell can know."""
WAYS = ("near", "top", "mean", "own")


@dataclass(frozen=True)
class Setting:
    """A window, and a way to add the bias; None: no bias at all."""

    window: int
    way: str | None


@dataclass(frozen=True)
class Head:
    """Queries, keys and values (N,D) of one head, its clusters, and the cells of its keys."""

    query: Tensor
    key: Tensor
    value: Tensor
    labels: Tensor
    cell: Tensor
    clusters: int
    cells: int
    scale: float


def of_distances(bias: Tensor) -> Tensor:
    """The bias b_h(δ) of each distance δ = −(N−1), …, N−1 from a dense one (1,H,N,N); it depends on nothing else."""
    table = torch.cat([bias[0, :, :, 0].flip(1), bias[0, :, 0, 1:]], dim=1)
    if not torch.equal(dense(table, bias.shape[2]), bias[0]):
        raise SystemExit("the model's bias is not one of distance")
    return table


def dense(table: Tensor, tokens: int) -> Tensor:
    """b_h(j − i) as (H,N,N)."""
    at = torch.arange(tokens)
    return table[:, at - at[:, None] + table.shape[1] // 2]


def heads_of(call: LayerInputs, method: ClusteredTail) -> Iterator[Head]:
    """The heads of a layer, with the clusters and cells that `clustered-tail` makes."""
    N, scale = call.query.shape[2], call.options["scale"]
    clusters = method.clusters or root(2 * N)
    labels = query_clusters(
        call.query, call.key, None, None, space="logits", counts=None, seed=0,
        clusters=clusters, bits=method.bits, iterations=method.iterations, refine=method.refine,
    )  # fmt: skip
    cell = key_cells(call.key, call.value, None, cells=method.cells, seed=0)
    for h in range(call.query.shape[1]):
        tensors = (call.query[0, h], call.key[0, h], call.value[0, h], labels[0, h], cell[0, h])
        yield Head(*tensors, clusters, method.cells, scale)


def exact_keys(head: Head, topk: int) -> tuple[Tensor, Tensor, Tensor]:
    """q̄ of each cluster, whether key j is exact for it (C,M), and k̄ of each cell as the cluster sees it (X,C,D)."""
    query, key, value, labels, cell = (
        x[None, None] for x in (head.query, head.key, head.value, head.labels, head.cell)
    )
    means, top, tail = exact_keys_and_cells(
        query, key, value, labels, cell, None, head.clusters, topk, head.cells, head.scale
    )
    return means[0, 0], torch.zeros(head.clusters, len(head.key)).scatter(1, top[0, 0], 1).bool(), tail.key[0, 0]


@dataclass(frozen=True)
class Pairs:
    """Logits of a head's pairs (N,M) without the bias, as exact keys and as keys of cells; and which keys are top."""

    products: Tensor
    of_cells: Tensor
    top: Tensor

    def seen(self, window: int) -> Tensor:
        """The logits that the method gives each pair."""
        return torch.where(self.top | near(len(self.products), window), self.products, self.of_cells)


def near(tokens: int, window: int) -> Tensor:
    """True for the keys that are at most `window` from each query, (N,M)."""
    at = torch.arange(tokens)
    return (at - at[:, None]).abs() <= window


def pairs_of(head: Head, topk: int) -> Pairs:
    """The logits of a head."""
    means, exact, centroids = exact_keys(head, topk)
    apart = head.query - broadcast(means[None, None], head.labels[None, None])[0, 0]
    by_cell = (centroids[:, head.labels] * apart).sum(-1).T * head.scale  # (N,X)
    of_cells = (means @ head.key.T * head.scale)[head.labels] + by_cell[:, head.cell]
    return Pairs(head.query @ head.key.T * head.scale, of_cells, exact[head.labels])


def bias_seen(head: Head, pairs: Pairs, setting: Setting, bias: Tensor) -> Tensor:
    """The bias that each pair has in one of the ways (N,M)."""
    close, far = near(len(bias), setting.window), (bias[0, -1] + bias[-1, 0]) / 2  # the mean of both sides' last
    if setting.way == "near":
        return torch.where(close, bias, far)
    if setting.way == "top":
        return torch.where(close | pairs.top, bias, far)
    if setting.way == "mean":
        return torch.where(close | pairs.top, bias, bias_of_cells(head, bias, ~close))
    return bias


def bias_of_cells(head: Head, bias: Tensor, far: Tensor) -> Tensor:
    """ln of the mean of e^b over the keys of each key's cell that are far from the query (N,M)."""
    member, counted = torch.nn.functional.one_hot(head.cell, head.cells).to(bias.dtype), far.to(bias.dtype)
    return ((counted * bias.exp()) @ member / (counted @ member)).log()[:, head.cell]


def squared_errors(head: Head, topk: int, settings: Sequence[Setting], bias: Tensor) -> Tensor:
    """‖out − exact‖² and ‖exact‖² of each setting, (settings, 2)."""
    pairs = pairs_of(head, topk)
    plain, biased = ((pairs.products + b).softmax(-1) @ head.value for b in (0, bias))
    squares = []
    for setting in settings:
        logits, wanted = pairs.seen(setting.window), plain if setting.way is None else biased
        if setting.way is not None:
            logits = logits + bias_seen(head, pairs, setting, bias)
        squares.append([float(x.square().sum()) for x in (logits.softmax(-1) @ head.value - wanted, wanted)])
    return torch.tensor(squares, dtype=torch.float64)


def layer_errors(call: LayerInputs, settings: Sequence[Setting], method: ClusteredTail) -> Tensor:
    """The relative error of each setting in one layer."""
    bias = of_distances(call.options["bias"])
    squares = torch.zeros(len(settings), 2, dtype=torch.float64)
    N = call.query.shape[2]
    for h, head in enumerate(heads_of(call, method)):
        of_head = dense(bias[h : h + 1], N)[0]
        topk = min(method.topk or root(8 * N), N)
        squares += squared_errors(head, topk, settings, of_head)
    return (squares[:, 0] / squares[:, 1]).sqrt()


def settings_of(windows: Sequence[int]) -> list[Setting]:
    """All columns of the table, window by window."""
    return [Setting(window, way) for window in windows for way in (None, *WAYS)]


def table(windows: Sequence[int], errors: Tensor) -> str:
    """The errors (layers, settings) of one length in Markdown, with their ratio to the first one."""
    means, ways = errors.mean(0), 1 + len(WAYS)
    cells = [f"{error:.4f} ({error / means[0]:.2f}×)" for error in means.tolist()]
    rows = [[str(window), *cells[n * ways : (n + 1) * ways]] for n, window in enumerate(windows)]
    return sheet.table(["window", "no bias", *WAYS], rows)


def passage(pretrained: Pretrained, book: Path, length: int, start: int) -> list[int]:
    """`length` tokens of a text, special ones included, from a character on."""
    document = read_documents([book])[0][start : start + 8 * length]
    return pretrained.wrap(pretrained.content_ids(document), length)


@torch.no_grad()
def main(
    book: Path,
    model: Annotated[
        str | None, typer.Option(help="a folder; default: all-mpnet-base-v2 as `mpnet_base.py` makes it")
    ] = None,
    lengths: tuple[int, ...] = (512, 2048),
    windows: tuple[int, ...] = (0, 16, 32, 64, 128),
    layers: Annotated[tuple[int, ...], typer.Option(help="layers that are measured; default: all")] = (),
    start: Annotated[int, typer.Option(help="first character of the passage")] = 20_000,
    out: Path | None = None,
) -> None:
    pretrained, settings, parts = load(model or str(mpnet_base.folder())), settings_of(windows), []
    for length in lengths:
        if (hf.position_limit(pretrained.model) or length) < length:
            hf.extend_positions(pretrained.model, length)
        with recorded(pretrained.model) as calls:
            pretrained.forward([passage(pretrained, book, length, start)])
        measured = [call for call in calls if not layers or call.number in layers]
        errors = torch.stack([layer_errors(call, settings, ClusteredTail()) for call in measured])
        numbers = ", ".join(str(call.number) for call in measured)
        parts += [f"## {length:,} tokens", f"Layers {numbers}.", table(windows, errors)]
    sheet.publish("A bias of distance in clustered-tail", [ABOUT, *parts], out)


if __name__ == "__main__":
    sheet.run(main)
