"""Tasks of decoders: perplexity on novels, and facts to retrieve from long prompts (`subquad needle`)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from decoder_passages import BOOKS, Passage, passages
from task_cells import DIFFERENCE, EXACT, Cell, Figures, Interval, attention, compared, difference, interval

from subquad.core.errors import InputError
from subquad.tools.data.texts import read_text
from subquad.tools.models.next_tokens import POSITIONS, logits_of
from subquad.tools.models.pretrained import Pretrained
from subquad.tools.needle.prompts import Haystack, Prompt
from subquad.tools.needle.scoring import answer_score
from subquad.tools.needle.settings import NEEDLE_TASKS
from subquad.tools.needle.tasks import TASKS
from subquad.tools.runs.jobs import Progress

BLOCK = 64  # positions that are resampled together, because their losses depend on each other


def novel_passages(pretrained: Pretrained, data: Path, length: int, total: int) -> list[Passage]:
    """Passages of exactly `length` tokens, of `total` tokens at most.

    Raises:
        InputError: there is none or there are fewer, or the novels are missing or too short.
    """
    if total < length:
        raise InputError(f"--tokens {total:,} is less than one passage of {length:,} tokens; give more, or --lengths")
    for book, file in BOOKS.items():
        tokens = len(pretrained.content_ids(read_text(data / "gutenberg" / file)))
        if tokens < length:
            raise InputError(f"{book} has {tokens:,} tokens, fewer than {length:,}; give shorter --lengths")
    chosen = passages(pretrained, data, length, total // length)
    if len(chosen) < total // length:
        most = len(chosen) * length
        raise InputError(f"--tokens {total:,} is more than the {most:,} that passages of {length:,} have; give those")
    return chosen


@dataclass(frozen=True)
class Perplexity:
    """The loss of a decoder on each next token of some passages, at one length."""

    pretrained: Pretrained
    methods: Sequence[str]
    length: int
    passages: Sequence[Passage]
    name: str = "perplexity"

    @property
    def rows(self) -> list[str]:
        """Exact attention and the methods."""
        return [EXACT, *self.methods]

    def inputs(self) -> object:
        """The passages."""
        return [self.length, [passage.tokens for passage in self.passages]]

    def measure(self, row: str, progress: Progress) -> Cell:
        """The losses of each passage's next tokens, in nats."""
        losses = []
        with attention(self.pretrained, row):
            for number, passage in enumerate(self.passages):
                progress("passages", number, len(self.passages))
                losses.append(next_token_losses(self.pretrained, passage.tokens))
        return losses

    def about(self) -> str:
        """Describe the passages that were measured, one sentence a line."""
        return (
            f"Passages of {self.length:,} tokens from {' and '.join(BOOKS)}: {len(self.passages)}.\n"
            "The model may have read these novels when it was trained.\n"
            f"Resamples take blocks of {BLOCK} positions."
        )

    def figures(self, cell: Cell, exact: Cell) -> dict[str, Figures]:
        """The perplexity, and the difference of the mean loss."""
        mine, its = block_means(cell), block_means(exact)
        perplexity = Interval(*map(math.exp, interval(mine)))
        return {"": {"perplexity": perplexity, f"{DIFFERENCE} in nats per token": difference(mine, its)}}


@torch.inference_mode()
def next_token_losses(pretrained: Pretrained, tokens: Sequence[int]) -> list[float]:
    """The negative log-likelihood in nats of each token but the first."""
    run, following = pretrained.prefill([tokens]), torch.tensor(tokens[1:], device=pretrained.device)
    losses: list[float] = []
    for start in range(0, len(following), POSITIONS):
        at = slice(start, min(start + POSITIONS, len(following)))
        likelihoods = logits_of(run, at)[0].log_softmax(-1)
        losses += (-likelihoods.gather(-1, following[at, None])[:, 0]).tolist()
    return [round(loss, 6) for loss in losses]


def block_means(losses: Cell) -> list[float]:
    """The mean loss of each block of positions; what is left over at the end of a passage is not counted."""
    return [
        sum(of_passage[at : at + BLOCK]) / BLOCK
        for of_passage in losses
        for at in range(0, len(of_passage) - BLOCK + 1, BLOCK)
    ]


def needle_prompts(pretrained: Pretrained, data: Path, length: int, each: int, seed: int) -> list[Prompt]:
    """`each` prompts of every task, with facts of their own in a text of their own, at depths spread from 0 to 1."""
    novels = [read_text(data / "gutenberg" / file) for file in BOOKS.values()]
    haystack = Haystack(pretrained, [token for novel in novels for token in pretrained.content_ids(novel)])
    depths = [number / max(each - 1, 1) for number in range(each)]
    return [
        haystack.prompt(task, length, None if task.spread else depth, number, seed)
        for task in (TASKS[name] for name in NEEDLE_TASKS)
        for number, depth in enumerate(depths)
    ]


@dataclass(frozen=True)
class Needle:
    """Facts in prompts of one length, and how well a decoder answers."""

    pretrained: Pretrained
    methods: Sequence[str]
    length: int
    prompts: Sequence[Prompt]
    name: str = "needle"

    @property
    def rows(self) -> list[str]:
        """Exact attention and the methods."""
        return [EXACT, *self.methods]

    def inputs(self) -> object:
        """The prompts and their answers."""
        return [self.length, [[prompt.tokens, prompt.answer] for prompt in self.prompts]]

    def measure(self, row: str, progress: Progress) -> Cell:
        """Measure, for each prompt, whether greedy decoding gives the answer, and the log-likelihood of its tokens."""
        scores = []
        with attention(self.pretrained, row):
            for number, prompt in enumerate(self.prompts):
                progress("prompts", number, len(self.prompts))
                score = answer_score(self.pretrained, prompt)
                scores.append([float(score.right), score.log_likelihood])
        return scores

    def about(self) -> str:
        """Describe the prompts that were measured, one sentence a line."""
        return (
            f"{len(self.prompts)} prompts of {self.length:,} tokens with their answers: as many of each of the tasks "
            f"{', '.join(NEEDLE_TASKS)} of `subquad needle`, at depths from 0 to 1, in text from {' and '.join(BOOKS)}."
        )

    def figures(self, cell: Cell, exact: Cell) -> dict[str, Figures]:
        """The share of right answers, and the log-likelihood of an answer's token."""
        names = ("right answers", "nats per answer token")
        columns = zip(names, zip(*cell, strict=True), zip(*exact, strict=True), strict=True)
        return {"": {title: each for column in columns for title, each in compared(*column).items()}}
