"""The rows of `sq.Controlled`, compared with an estimate from a random sample of keys instead of exact attention.

A query with logits l_j meets the keys F exactly (the first, the nearest, and those of largest logit), and a sample S of
b of its n other keys, without replacement. As in vAttention (arXiv 2510.05688):

    D = Σ_F e^{l_j} + (n/b) Σ_S e^{l_j},     out = (Σ_F e^{l_j} v_j + (n/b) Σ_S e^{l_j} v_j) / D
    radius = Φ⁻¹(1 − δ/2) · n √(Tr Σ · (1/b − 1/n)) / D,     Σ the covariance of e^{l_j} (v_j − out) in S

b is the least for which the radius, predicted from a base sample, is at most ε‖out‖. Three choices favour the estimate:
the keys of largest logit are known without a search; the ratio is linearised, which is narrower than bounds of D and of
the sum above it; and S has no key twice, so that a sample of all keys is exact.
"""

import math
import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import decoder_passages
import sheet
import speeches
import torch
from scipy.stats import spearmanr
from torch import Tensor
from torch.distributions import Normal

import subquad as sq
from subquad.audits.exact_rows import exact_rows, relative_errors
from subquad.methods import Full
from subquad.methods.core.call import Call
from subquad.tools.measure.capture import LayerInputs, recorded
from subquad.tools.models.pretrained import load

ROWS, CONFIDENCE, STAGES = 32, 0.95, 2  # of `sq.Controlled`
TOLERANCES = (0.02, 0.1, 0.3)
FIRST, NEAR = 16, 8  # the number of first keys, and the distance of the nearest
TOP, BASE, LEAST = 0.05, 0.05, 32  # shares of the visible keys and of the others, and the smallest base sample

ABOUT = """\
{rows} rows of each head, as `sq.Controlled` samples them, in fp64.
The encoder is the demo encoder, layers 0, 2 and 4, on a speech; the decoder is SmolLM2-135M-Instruct, causal, layers \
{layers}, on a passage of a novel.
A sampled row meets exactly the first {first} keys, those within {near} positions and, if said, the 5 % of largest \
logit, which are known without a search here.
Keys read are these and the sample, relative to all that a query sees; an exact row reads all, and has a radius of \
0."""
INTERVALS = """\
δ is 0.05 for each row.
"Right" is the share of the rows with the exact output within the radius, without the rows that read all keys.
The radius is relative to the length of the exact row, as the error of `clustered-tail` (by halves in the decoder)."""
HEADS = """\
A row passes if its error is at most the tolerance, and a head passes if all its rows do.
A row is certified to pass if its error is at most the tolerance for every output within the radius; the radius holds \
for all rows of a head together at confidence 0.975, and ε is a third of the tolerance; "wrongly" counts the certified \
rows that do not pass.
The share bound is that of `sq.Controlled` for the rows that can be read with as many keys as {rows} exact rows."""
RANGES = """\
The range of a row is its largest visible logit less its smallest; that of a head is the median of its rows.
The error of a head is the root of the mean square of its rows' errors.
Rank correlation is Spearman's of the two, over the heads."""
TIMES = """\
Median milliseconds for the rows of one layer.
The sampled rows read as many keys as ε = 0.1 takes with top keys, in the mean, at random places that are given, so \
that neither the search of top keys nor the sampling is in this time.
Each row has its own keys, or all rows that share keys and values have the same ones, for one product."""


class Rows(NamedTuple):
    """The sampled rows of one head: logits (R,M) and what they see, the values (M,E), and the output of a method."""

    logits: Tensor
    visible: Tensor
    ahead: Tensor  # (R,M), the key's position less the query's
    value: Tensor
    out: Tensor

    @property
    def visible_logits(self) -> Tensor:
        """The logits, −∞ for keys that a row does not see."""
        return self.logits.masked_fill(~self.visible, -math.inf)

    @property
    def exact(self) -> Tensor:
        """The output of exact attention."""
        return self.visible_logits.softmax(-1) @ self.value


class Estimate(NamedTuple):
    """The estimated output (R,E) of each row, its radius and the number of keys read."""

    out: Tensor
    radius: Tensor
    keys: Tensor
    all_keys: Tensor


class Inputs(NamedTuple):
    """The recorded layers of one model at one length."""

    title: str
    calls: Sequence[LayerInputs]


def exact_keys(rows: Rows, top: float) -> Tensor:
    """F: the first keys, the nearest, and this share of the visible ones, those of largest logit."""
    first = torch.arange(rows.logits.shape[1]) < FIRST
    order = rows.visible_logits.argsort(-1, descending=True).argsort(-1)
    largest = order < (top * rows.visible.sum(-1, keepdim=True)).ceil()
    return (first | (rows.ahead.abs() <= NEAR) | largest) & rows.visible


def estimate(rows: Rows, fixed: Tensor, epsilon: float, delta: float, generator: torch.Generator) -> Estimate:
    """Attend to the exact keys and to a sample of the others that is as large as ε and δ need."""
    weights = (rows.logits - rows.visible_logits.amax(-1, keepdim=True)).exp()
    others = rows.visible & ~fixed
    n = others.sum(-1).double()
    draws = torch.rand(others.shape, generator=generator).masked_fill(~others, 2.0).argsort(-1).argsort(-1)
    quantile = float(Normal(0.0, 1.0).icdf(torch.tensor(1 - delta / 2, dtype=torch.float64)))

    def sampled(b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Output, D and Tr Σ of a sample of b."""
        p = weights * ((draws < b[:, None]) & others)
        scale = n / b.clamp(min=1)
        total = (weights * fixed).sum(-1) + scale * p.sum(-1)
        out = ((weights * fixed) @ rows.value + scale[:, None] * (p @ rows.value)) / total[:, None]
        apart = rows.value.square().sum(-1) - 2 * out @ rows.value.T + out.square().sum(-1, keepdim=True)
        mean = (p @ rows.value - p.sum(-1, keepdim=True) * out) / b.clamp(min=1)[:, None]
        trace = (p.square() * apart).sum(-1) - b * mean.square().sum(-1)
        return out, total, trace.clamp(min=0) / (b - 1).clamp(min=1)

    base = torch.minimum((BASE * n).ceil().clamp(min=LEAST), n)
    out, total, trace = sampled(base)
    wanted = (epsilon * out.norm(dim=-1) * total / quantile / n.clamp(min=1)).square() / trace
    b = torch.maximum(base, torch.minimum((1 / (wanted + 1 / n.clamp(min=1))).ceil(), n))
    out, total, trace = sampled(b)
    radius = quantile * n * (trace * (1 / b.clamp(min=1) - 1 / n.clamp(min=1)).clamp(min=0)).sqrt() / total
    return Estimate(out, radius, fixed.sum(-1) + b, b == n)


def prepared(layer: LayerInputs) -> tuple[Tensor, Tensor, Tensor, Call]:
    """The inputs of a layer as `exact_rows` takes them."""
    options = {name: layer.options[name] for name in ("mask", "bias", "scale")}
    gqa = layer.query.shape[1] != layer.key.shape[1]
    return Full().prepare(layer.query, layer.key, layer.value, enable_gqa=gqa, **options)


def drawn(layer: LayerInputs, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Item, head and query of the rows, head by head."""
    H, N = layer.query.shape[1:3]
    row = torch.randint(N, (H, ROWS), generator=generator)
    return torch.zeros(H * ROWS, dtype=torch.long), torch.arange(H).repeat_interleave(ROWS), row.flatten()


def heads(layer: LayerInputs, chosen: tuple[Tensor, Tensor, Tensor]) -> Iterator[Rows]:
    """The sampled rows of each head, with the output of "clustered-tail"."""
    query, key, value, call = prepared(layer)
    out, keys = layer.run(sq.ClusteredTail()), torch.arange(key.shape[2])
    for head in range(query.shape[1]):
        row = chosen[2][chosen[1] == head]
        group = head * key.shape[1] // query.shape[1]
        logits = call.scale * query[0, head, row].double() @ key[0, group].double().T
        visible = call.mask.sees(row[:, None], keys)
        yield Rows(logits, visible, keys - row[:, None], value[0, group].double(), out[0, head, row].double())


def shares(estimates: Sequence[Estimate], rows: Sequence[Rows]) -> float:
    """Keys read, of the visible ones, mean of rows."""
    read = [each.keys / head.visible.sum(-1) for each, head in zip(estimates, rows, strict=True)]
    return float(torch.cat(read).mean())


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def interval_lines(title: str, rows: Sequence[Rows], generator: torch.Generator) -> list[list[str]]:
    """Coverage, width and keys read, with and without keys of largest logit."""
    error = torch.cat([relative_errors(head.out, head.exact) for head in rows])
    lines = []
    for top in (TOP, 0.0):
        fixed = [exact_keys(head, top) for head in rows]
        for epsilon in TOLERANCES:
            estimates = [estimate(head, keys, epsilon, 0.05, generator) for head, keys in zip(rows, fixed, strict=True)]
            within, width, sampled = [], [], []
            for each, head in zip(estimates, rows, strict=True):
                length = head.exact.norm(dim=-1)
                within.append((each.out - head.exact).norm(dim=-1) <= each.radius + 1e-9 * length)
                width.append(each.radius / length)
                sampled.append(~each.all_keys)
            some_keys, wide = torch.cat(sampled), torch.cat(width)
            lines.append(
                [
                    title,
                    "with" if top else "without",
                    f"{epsilon}",
                    percent(shares(estimates, rows)),
                    percent(float(torch.cat(within)[some_keys].double().mean())) if some_keys.any() else sheet.MISSING,
                    f"{float(wide.median()):.3f}",
                    f"{float(wide.quantile(0.95)):.3f}",
                    f"{float(error.median()):.3f}",
                ]
            )
    return lines


def head_lines(title: str, rows: Sequence[Rows], generator: torch.Generator) -> list[list[str]]:
    """Rows and heads that pass and are certified, and the bound of the share for as many keys."""
    lines = []
    delta = 1 - CONFIDENCE
    for tolerance in TOLERANCES:
        passed, certified, estimates = [], [], []
        for head in rows:
            each = estimate(head, exact_keys(head, TOP), tolerance / 3, delta / STAGES / 2 / ROWS, generator)
            size = (each.out.norm(dim=-1) - each.radius).clamp(min=0)
            passed.append(relative_errors(head.out, head.exact) <= tolerance)
            certified.append((head.out - each.out).norm(dim=-1) + each.radius <= tolerance * size)
            estimates.append(each)
        read = shares(estimates, rows)
        bound = 1 - (delta / STAGES / 2) ** (read / ROWS)
        lines.append(
            [
                title,
                f"{tolerance}",
                *(percent(float(torch.cat(which).double().mean())) for which in (passed, certified)),
                f"{sum(int((sure & ~good).sum()) for sure, good in zip(certified, passed, strict=True))}",
                *(f"{sum(bool(each.all()) for each in which)} of {len(which)}" for which in (passed, certified)),
                percent(read),
                f"{1 - (delta / STAGES) ** (1 / ROWS):.3f}",
                f"{bound:.3f}",
            ]
        )
    return lines


def range_line(title: str, rows: Sequence[Rows]) -> list[str]:
    """The range of logits of the heads, their errors, and how the two go together."""
    ranges, errors = [], []
    for head in rows:
        least = head.logits.masked_fill(~head.visible, math.inf).amin(-1)
        ranges.append(float((head.visible_logits.amax(-1) - least).median()))
        errors.append(float(relative_errors(head.out, head.exact).square().mean().sqrt()))
    low, middle, high = (f"{float(torch.tensor(ranges).quantile(at)):.1f}" for at in (0, 0.5, 1))
    widest = max(range(len(rows)), key=ranges.__getitem__)
    return [
        title,
        *(low, middle, high),
        f"{float(spearmanr(ranges, errors).statistic):.2f}",
        f"{errors[widest]:.3f}",
        f"{max(errors):.3f}",
    ]


def sampled_rows(layer: LayerInputs, chosen: tuple[Tensor, Tensor, Tensor], index: Tensor, shared: bool) -> Tensor:
    """Attention of each row to its own keys `index` (R,c), or to those of the first row of its group."""
    query, key, value, call = prepared(layer)
    group = chosen[1] * key.shape[1] // query.shape[1]
    out = []
    for g in range(key.shape[1]):
        members = (group == g).nonzero()[:, 0]
        queries, met = query[0, chosen[1][members], chosen[2][members]], index[members[0]] if shared else index[members]
        keys, values = key[0, g][met], value[0, g][met]
        logits = call.scale * (queries @ keys.T if shared else (keys @ queries[:, :, None])[..., 0])
        weights = logits.softmax(-1)
        out.append(weights @ values if shared else (weights[:, None] @ values)[:, 0])
    return torch.cat(out)


def time_line(inputs: Inputs, rows: Sequence[Rows], seconds: float, generator: torch.Generator) -> list[str]:
    """The time of the rows, exact and sampled, and of the layer by the method and by exact attention."""
    estimates = [estimate(head, exact_keys(head, TOP), 0.1, 0.05, generator) for head in rows]
    c = round(float(torch.cat([each.keys for each in estimates]).mean()))
    layer = inputs.calls[len(inputs.calls) // 2]
    chosen = drawn(layer, generator)
    index = torch.randint(layer.key.shape[2], (len(chosen[0]), c), generator=generator)
    calls = {
        "full": partial(layer.run, Full()),
        "clustered-tail": partial(layer.run, sq.ClusteredTail()),
        "exact rows": lambda: exact_rows(*prepared(layer), chosen),
        "sampled rows": partial(sampled_rows, layer, chosen, index, False),
        "of shared keys": partial(sampled_rows, layer, chosen, index, True),
    }
    times = sheet.milliseconds(calls, seconds).values()
    return [inputs.title, *(f"{statistics.median(each):.1f}" for each in times), f"{c:,}"]


def encoder_inputs(data: Path, length: int) -> Inputs:
    """Three layers of the demo encoder on one speech."""
    return Inputs(f"encoder, {length:,} tokens", speeches.passages(data, length, 1).inputs([0, 2, 4]))


def decoder_inputs(data: Path, length: int) -> Inputs:
    """Five layers of the demo decoder on one passage of a novel."""
    pretrained = load(decoder_passages.MODEL)
    (passage,) = decoder_passages.passages(pretrained, data, length, 1)
    with recorded(pretrained.model) as calls:
        pretrained.prefill([passage.tokens])
    return Inputs(f"decoder, {length:,} tokens", [calls[layer] for layer in decoder_passages.LAYERS])


def main(
    data: Path = sheet.DATA,
    lengths: tuple[int, ...] = (512, 4096),
    prompts: tuple[int, ...] = (2048, 8192),
    seconds: float = 2.0,
    out: Path | None = None,
) -> None:
    """Print the tables."""
    generator = torch.Generator().manual_seed(0)
    intervals, by_head, ranges, times = [], [], [], []
    with torch.inference_mode():
        for read, sizes in ((encoder_inputs, lengths), (decoder_inputs, prompts)):
            for length in sizes:
                inputs = read(data, length)
                rows = [head for layer in inputs.calls for head in heads(layer, drawn(layer, generator))]
                intervals += interval_lines(inputs.title, rows, generator)
                by_head += head_lines(inputs.title, rows, generator)
                ranges.append(range_line(inputs.title, rows))
                times.append(time_line(inputs, rows, seconds, generator))
                print(*intervals[-6:], *by_head[-3:], ranges[-1], times[-1], sep="\n", flush=True)
    parts = [
        ABOUT.format(rows=ROWS, first=FIRST, near=NEAR, layers=", ".join(map(str, decoder_passages.LAYERS))),
        "## Intervals",
        INTERVALS,
        sheet.table(
            ("rows", "top keys", "ε", "keys read", "right", "median radius", "95th percentile", "median error"),
            intervals,
        ),
        "## Heads",
        HEADS.format(rows=ROWS),
        sheet.table(
            (
                *("rows", "tolerance", "rows that pass", "certified", "wrongly", "heads that pass", "certified"),
                *("keys read", "share bound, exact", "share bound, sampled"),
            ),
            by_head,
        ),
        "## Range of logits",
        RANGES,
        sheet.table(
            (
                *("heads", "least range", "median", "largest", "rank correlation with the error"),
                *("error of the head with the largest range", "largest error"),
            ),
            ranges,
        ),
        "## Time",
        TIMES,
        sheet.table(
            (
                *("rows", "exact attention", "`clustered-tail`", "exact rows", "sampled rows", "of shared keys"),
                "keys of a sampled row",
            ),
            times,
        ),
    ]
    sheet.publish("Rows from a sample of keys", parts, out)


if __name__ == "__main__":
    sheet.run(main)
