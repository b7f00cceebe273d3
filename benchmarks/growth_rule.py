"""Rules for the growth of clusters, top keys and cells of causal by halves with the length, in a decoder.

    python benchmarks/growth_rule.py [--data FOLDER] [--lengths "8192 16384"] [--passages 3] [--out FILE.md]

FOLDER holds gutenberg/; the default is the environment variable SUBQUAD_DATA. All runs are prefills of the whole model
in bf16. Beyond its own positions, the model has YaRN's (Peng et al. 2023, arXiv 2309.00071), untrained. Next tokens are
compared with those of subquad's exact kernel in bf16. Times are processor times, which other work disturbs less than
the time that passes.
"""

import math
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

import decoder_passages
import sheet
import torch
import typer
from decoder_passages import MODEL, Passage
from torch import Tensor

from subquad.methods import ClusteredTail, Full, Method
from subquad.methods.core.method import Call, Partial, number
from subquad.tools.models.next_tokens import NextTokens, Prefill, differences, next_of, one_of_each, summed
from subquad.tools.models.pretrained import Pretrained, load, running

LENGTHS = (8192, 16384)
EXACT = "full:kernel=subquad"
PARTS = 4  # of a passage, whose next tokens are counted apart
POSITIONS = 1024  # whose next tokens are compared, evenly spaced
HEAD = ("rule", "KL", "quarters", "same top token", "perplexity", "time")
ABOUT = """\
SmolLM2-135M-Instruct, every layer, bf16, beside `{exact}` in bf16 (row "exact"), {passages} of each length from two \
novels; beyond 8,192 tokens with YaRN.
KL is that of next-token distributions, exact ‖ method, in nats, at {positions:,} evenly spaced positions: over their \
second half, and over each quarter.
Same top token and perplexity are of the second half.
n is the number of queries of a rectangle and m that of its keys; all rules have 32 cells and, if nothing else is \
written, blocks of 2,048 tokens.
Time is the processor time of the prefill over that of `{exact}`, the median of the passages."""


@dataclass(frozen=True)
class TailByPowers(ClusteredTail):
    """`clustered-tail` by halves with clusters·(n/1024)^of_clusters clusters and topk·(m/1024)^of_topk top keys."""

    of_clusters: float = number(0.5, least=0.0)
    of_topk: float = number(0.5, least=0.0)

    name: ClassVar[str] = "tail-by-powers"

    def attend_in_rectangle(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Partial:
        clusters = math.ceil(self.clusters * (query.shape[2] / 1024) ** self.of_clusters)
        topk = math.ceil(self.topk * (key.shape[2] / 1024) ** self.of_topk)
        return replace(self, clusters=clusters, topk=topk).attend(query, key, value, call)


ROOTS = TailByPowers(clusters=32, topk=181)
POWERS = replace(ROOTS, of_clusters=0.75, of_topk=0.75)
RULES: dict[str, Method] = {
    "exact, by SDPA": Full(),
    "n^¾/√32 clusters, m^¾ keys (default)": ClusteredTail(),
    "the same, blocks of 1,024": ClusteredTail(block=1024),
    "the same, blocks of 4,096": ClusteredTail(block=4096),
    "n^¾/4, m^¾": replace(POWERS, clusters=46),
    "n/22, m^¾": replace(POWERS, clusters=46, of_clusters=1.0),
    "n^¾/√32, 181·(m/1024)^0.85": replace(POWERS, clusters=32, of_topk=0.85),
    "√n clusters, √(32m) keys, blocks of 1,024": replace(ROOTS, block=1024),
    "2√n, 181·(m/1024)^0.7": replace(ROOTS, clusters=64, of_topk=0.7),
    "2.8√n, 181·(m/1024)^0.7": replace(ROOTS, clusters=90, of_topk=0.7),
    "4√n, 181·(m/1024)^0.7": replace(ROOTS, clusters=128, of_topk=0.7),
    "n/32, 181·(m/1024)^0.7": replace(POWERS, of_clusters=1.0, of_topk=0.7),
    "n/16, 181·(m/1024)^0.7": replace(POWERS, clusters=64, of_clusters=1.0, of_topk=0.7),
    "default, 64 cells": ClusteredTail(cells=64),
    "default, three rounds of k-means": ClusteredTail(refine=3),
}


class Reading(NamedTuple):
    """A prefill beside the exact one: the next tokens of each quarter, and the processor time over that of exact."""

    quarters: list[NextTokens]
    time: float


def timed_prefill(pretrained: Pretrained, passage: Passage, method: Any) -> tuple[Prefill, float]:
    """The states of a prefill at the positions that are compared, and its processor time."""
    with running(pretrained.model, method):
        begun = time.process_time()
        run = pretrained.prefill([passage.tokens])
        seconds = time.process_time() - begun
    return run.every(len(passage.tokens) // POSITIONS), seconds


def readings(pretrained: Pretrained, passage: Passage, rules: dict[str, Method]) -> dict[str, Reading]:
    """Each rule's prefill of a passage beside the exact one."""
    exact, exact_seconds = timed_prefill(pretrained, passage, EXACT)
    step = len(passage.tokens) // POSITIONS
    tokens, counted = (one_of_each(step, x) for x in next_of(pretrained.batch([passage.tokens])))
    result = {}
    for name, method in {"exact": EXACT, **rules}.items():
        run, seconds = (exact, exact_seconds) if name == "exact" else timed_prefill(pretrained, passage, method)
        quarters = []
        for at in torch.arange(tokens.shape[1]).chunk(PARTS):
            runs = {key: replace(each, states=each.states[:, at]) for key, each in (("exact", exact), (name, run))}
            quarters.append(differences(runs, "exact", tokens[:, at], counted[:, at])[name])
        result[name] = Reading(quarters, seconds / exact_seconds)
    return result


def row(name: str, several: list[Reading]) -> list[str]:
    """The row of a rule, over some passages."""
    quarters = [summed(each) for each in zip(*(reading.quarters for reading in several), strict=True)]
    half = summed(quarters[PARTS // 2 :])
    texts = [name, f"{half.mean_kl:.4f}", ", ".join(f"{each.mean_kl:.4f}" for each in quarters)]
    texts += [f"{half.agreement:.3f}", f"{half.perplexity:.2f}"]
    return [*texts, f"{statistics.median(reading.time for reading in several):.3f}"]


def main(
    lengths: tuple[int, ...] = LENGTHS,
    data: Path = sheet.DATA,
    passages: int = 3,
    rules: Annotated[list[str] | None, typer.Option(help="repeatable; default: all")] = None,
    out: Path | None = None,
) -> None:
    """Print a table for each length, and write them to a file where one is named."""
    names = rules or list(RULES)
    sheet.check_known("--rules", names, RULES)
    counted = decoder_passages.count_of(passages)
    parts = [ABOUT.format(exact=EXACT, passages=counted, positions=POSITIONS)]
    for length in lengths:
        pretrained = load(MODEL, dtype="bf16").reaching(length)
        chosen = decoder_passages.passages(pretrained, data, length, passages)
        several = [readings(pretrained, passage, {name: RULES[name] for name in names}) for passage in chosen]
        rows = [row(name, [each[name] for each in several]) for name in several[0]]
        parts += [f"## {length:,} tokens", sheet.table(HEAD, rows)]
    sheet.publish("How clusters, top keys and cells grow", parts, out, dtype="bf16")


if __name__ == "__main__":
    sheet.run(main)
