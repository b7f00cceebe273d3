"""The fidelity of steps that read some cells of the cached keys exactly, and a mean of each other cell.

    python benchmarks/step_cells.py [--data FOLDER] [--lengths "4096 8192"] [--cells "32 64"] [--passages 3]
        [--out FILE.md]

After an exact prefill, k-means divides the keys of each key head into cells of 16 on average. Their distance is that of
the logits of the prompt's last 256 queries. A step reads the first 16 tokens and those from the prompt's last 256 on
exactly, and of the cells between them those exactly that have most of its weight; each other cell is one key and one
value, with ln n added to the logit for its n keys. FOLDER holds gutenberg/; the default is the environment variable
SUBQUAD_DATA. The cells are written plainly: they compute all logits. `step_cells_time.py` has the times.
"""

import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import decoder_passages
import sheet
import torch
import torch.nn.functional as F
from decoder_passages import MODEL
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.masking_utils import sdpa_mask

from subquad.hf.rotary_passes import reach_of
from subquad.kernels.selection.clusters.reference import JITTER, cholesky, nearest_mean
from subquad.kernels.selection.group_means import group_mean, group_sizes
from subquad.tools.models.pretrained import Pretrained, load

STEPS = 256  # positions after the prompt
FIRST, LAST, SIZE, ROUNDS = 16, 256, 16, 8
NAME = "cells-of-keys"

ABOUT = f"""\
SmolLM2-135M-Instruct, every layer, {STEPS} tokens after an exact prefill of each length, beside exact attention; \
fp32, {{passages}}; with YaRN's positions if a length exceeds the model's 8,192.
KL is that of next-token distributions, exact ‖ cells, in nats.
The share is that of the keys that a step reads, with one for the mean of each cell; it reads as many values."""


@dataclass(frozen=True)
class Cells:
    """How cells are made and read."""

    exact: int  # cells whose keys are read
    by_head: bool = False  # the cells are chosen for each query head, instead of for all heads of a key head
    drop: bool = False  # the other cells are left out
    plain: bool = False  # k-means in the keys' own space
    all_queries: bool = False  # k-means by the logits of all queries of the prompt
    segments: int = 1  # of the prompt, each with cells of its own

    def __str__(self) -> str:
        said = [f"{self.exact} cells exact"]
        said += ["chosen by head"] if self.by_head else []
        said += ["the others dropped"] if self.drop else []
        said += ["plain k-means"] if self.plain else []
        said += ["k-means for all queries"] if self.all_queries else []
        said += [f"{self.segments} segments"] if self.segments > 1 else []
        return ", ".join(said)


def logit_factor(queries: Tensor) -> Tensor:
    """L with L Lᵀ = E[q qᵀ] + jitter, so that ‖k L‖² is the mean square of these queries' logits. (G,n,D) → (G,D,D)."""
    queries = queries.double()
    moment = queries.mT @ queries / queries.shape[1]
    jitter = JITTER * moment.diagonal(dim1=1, dim2=2).mean(-1)
    return cholesky((moment + jitter[:, None, None] * torch.eye(queries.shape[2]))[None])[0].float()


def kmeans(points: Tensor, count: int) -> Tensor:
    """Labels by Lloyd's rounds from evenly spaced points. (1,G,M,D) → (1,G,M)."""
    labels = torch.full(points.shape[:3], count)
    labels[..., torch.linspace(0, points.shape[2] - 1, count).long()] = torch.arange(count)
    for _ in range(ROUNDS + 1):
        labels = nearest_mean(points, labels, count)
    return labels


def labels_of(keys: Tensor, factor: Tensor, cells: Cells) -> tuple[Tensor, int]:
    """The cell of each key between the first and the last ones, and how many cells there are. (1,G,M,D) → (1,G,M)."""
    made, total = [], 0
    for part in (keys if cells.plain else keys @ factor).chunk(cells.segments, dim=2):
        count = max(1, part.shape[2] // SIZE)
        made.append(kmeans(part, count) + total)
        total += count
    return torch.cat(made, 2), total


class Attention:
    """An attention function of transformers: exact in the prompt, by cells in the steps, if there are any."""

    def __init__(self) -> None:
        self.cells: Cells | None = None
        self.factors: dict[tuple[int, bool], Tensor] = {}  # by layer, and for the last or all queries
        self.labels: dict[tuple[int, Cells], tuple[Tensor, int]] = {}
        self.read: list[float] = []  # the share of keys that each layer reads

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        heads, n, groups, m = *query.shape[1:3], *key.shape[1:3]
        layer = module.layer_idx
        if n == m:
            by_group = query[0].unflatten(0, (groups, -1))
            self.factors[layer, False] = logit_factor(by_group[:, :, -LAST:].flatten(1, 2))
            self.factors[layer, True] = logit_factor(by_group.flatten(1, 2))
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
        elif self.cells is None:
            below = torch.ones(n, m, dtype=torch.bool).tril(m - n)
            out = F.scaled_dot_product_attention(query, key, value, below, scale=scaling, enable_gqa=True)
        else:
            out = self.by_cells(self.cells, layer, query[0].unflatten(0, (groups, -1)), key, value, scaling)
            out = out.reshape(1, heads, n, -1)
        return out.transpose(1, 2), None

    def by_cells(self, cells: Cells, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Attention of the steps' queries (G,R,n,D) to keys and values (1,G,m,D)."""
        groups, ratio, n, _ = query.shape
        m = key.shape[2]
        between = slice(FIRST, m - n - LAST)
        inner = key[:, :, between]
        form = replace(cells, exact=0, by_head=False, drop=False)
        if (layer, form) not in self.labels:
            self.labels[layer, form] = labels_of(inner, self.factors[layer, form.all_queries], form)
        labels, count = self.labels[layer, form]
        means, of_values = (group_mean(x, labels, count)[0, :, None] for x in (inner, value[:, :, between]))
        of_cells = query @ means.mT * scale + group_sizes(labels, count)[0].log()[:, None, None]  # (G,R,n,C)
        logits = query @ key[0, :, None].mT * scale
        logits.masked_fill_(~torch.ones(n, m, dtype=torch.bool).tril(m - n), -torch.inf)
        near = torch.cat([logits[..., :FIRST], logits[..., m - n - LAST :]], -1)
        weights = torch.cat([of_cells, near], -1).softmax(-1)[..., :count]
        weights = weights if cells.by_head else weights.sum(1, keepdim=True)
        chosen = torch.zeros_like(weights, dtype=torch.bool)
        chosen.scatter_(-1, weights.topk(min(cells.exact, count), -1).indices, True)  # (G,1 or R,n,C)
        at = labels[0, :, None, None].expand(groups, chosen.shape[1], n, -1)
        kept = chosen.gather(-1, at).expand(groups, ratio, n, -1)
        logits[..., between] = logits[..., between].masked_fill(~kept, -torch.inf)
        of_cells = of_cells.masked_fill(chosen | torch.full_like(chosen, cells.drop), -torch.inf)
        all_weights = torch.cat([logits, of_cells], -1).softmax(-1)
        read = kept.any(1) if cells.by_head else kept[:, 0]  # by any head of a key head, which reads for all of them
        self.read.append((float(read.float().mean()) * inner.shape[2] + count + FIRST + LAST) / (m - n))
        return all_weights[..., :m] @ value[0, :, None] + all_weights[..., m:] @ of_values


def fidelity(pretrained: Pretrained, tokens: list[int], rows: list[Cells]) -> dict[Cells, tuple[float, float, float]]:
    """For each way: KL and share of equal top tokens over the steps after a prompt, and the share of keys read."""
    attention, model = Attention(), pretrained.model
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    try:
        with torch.inference_mode(), reach_of(len(tokens)):
            ids = torch.tensor([tokens])
            cache = DynamicCache(config=model.config)
            model(ids[:, :-STEPS], past_key_values=cache, logits_to_keep=1)

            def logits() -> Tensor:
                made = model(ids[:, -STEPS:], past_key_values=cache).logits[0].float().log_softmax(-1)
                cache.crop(-STEPS)
                return made

            exact, results = logits(), {}
            for cells in rows:
                attention.cells = cells
                attention.read.clear()
                other = logits()
                kl = float((exact.exp() * (exact - other)).sum(-1).mean())
                same = float((exact.argmax(-1) == other.argmax(-1)).float().mean())
                results[cells] = kl, same, statistics.mean(attention.read)
                print(f"{len(tokens) - STEPS:,} tokens, {cells}: KL {kl:.4f}, {same:.3f}", flush=True)
            return results
    finally:
        model.set_attn_implementation(before)


def main(
    lengths: tuple[int, ...] = (4096, 8192),
    cells: tuple[int, ...] = (32, 64),
    data: Path = sheet.DATA,
    passages: int = 3,
    out: Path | None = None,
) -> None:
    """Print the tables, and write them to a file where one is named."""
    rows = [Cells(each) for each in cells]
    most = rows[-1]
    rows += [replace(most, by_head=True), replace(most, drop=True), replace(most, segments=4)]
    rows += [replace(most, all_queries=True), replace(most, plain=True)]
    pretrained = load(MODEL)
    if (longest := max(lengths)) > (pretrained.limit or longest):
        pretrained = pretrained.extended_to(longest + STEPS).reaching(longest + STEPS)
    parts = [ABOUT.format(passages=decoder_passages.count_of(passages))]
    for length in lengths:
        read = decoder_passages.passages(pretrained, data, length + STEPS, passages)
        results = [fidelity(pretrained, each.tokens, rows) for each in read]
        lines = []
        for row in rows:
            kl, same, share = (statistics.mean(each[row][at] for each in results) for at in range(3))
            kls = "–".join(f"{each(result[row][0] for result in results):.4f}" for each in (min, max))
            lines.append([str(row), f"{100 * share:.1f} %", f"{kl:.4f}", kls, f"{same:.3f}"])
        table = sheet.table(["cells", "keys read", "KL", "of the passages", "same top token"], lines)
        parts += [f"## {length:,} tokens", table]
    sheet.publish("Cells of keys in steps", parts, out)


if __name__ == "__main__":
    sheet.run(main)
