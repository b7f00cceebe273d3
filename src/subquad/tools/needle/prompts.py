"""Prompts of an exact number of tokens: the user's text with the facts of a task in it, and the question at the end.

The task `cwe` has a list of the text's words in place of the text.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from subquad.core.errors import InputError
from subquad.tools.models.passages import SHORTEST
from subquad.tools.models.pretrained import Pretrained
from subquad.tools.needle.tasks import COMMON, UNCOMMON, NeedleTask, Puzzle, different_words

SENTENCE = 64  # tokens before a depth in which the end of a sentence is looked for
ENDS = (".", "!", "?")
_WORD = re.compile(r"[^\W\d_]{3,}")


@dataclass(frozen=True)
class Prompt:
    """Token ids of a prompt, special ones included, and of the answer that continues it."""

    tokens: list[int]
    answer: list[int]


@dataclass(frozen=True)
class Haystack:
    """The text that facts are put into, as the tokens of all documents."""

    pretrained: Pretrained
    tokens: list[int]

    @cached_property
    def words(self) -> list[str]:
        """The different words of three letters or more, in lower case."""
        return sorted(set(_WORD.findall(self.pretrained.tokenizer.decode(self.tokens).lower())))

    def prompt(self, task: NeedleTask, length: int, depth: float | None, sample: int, seed: int) -> Prompt:
        """The prompt of a task, which has `length` tokens together with its answer.

        The text and the facts depend on the seed, the task, the length and the sample, and not on the depth.

        Raises:
            InputError: the length has no room for the facts, or the text is too short for it.
        """
        draw = random.Random(f"{seed}/{task.name}/{length}/{sample}")
        start = draw.random()
        puzzle = task.make(draw, depth or 0.0, self.words)
        before = self.pretrained.first_tokens
        needles = [(at, self.pretrained.content_ids(f"\n{sentence}\n")) for at, sentence in puzzle.needles]
        question, answer = self._ending(puzzle)
        common = self._entries(puzzle.common, COMMON) if puzzle.common else []
        taken = sum(map(len, (before, question, answer, *common, *(ids for _, ids in needles))))
        count = length - taken
        if count < SHORTEST:
            raise InputError(
                f"{length:,} tokens are too few for the task {task.name}, whose facts, question and answer take "
                f"{taken:,}; give --lengths of at least {taken + SHORTEST:,} tokens"
            )
        if common:
            common, count = self._word_list(puzzle, common, count, draw)
        if count > len(self.tokens):
            raise InputError(
                f"a prompt of {length:,} tokens takes {count:,} tokens of text, but the text has "
                f"{len(self.tokens):,}; give more --text, or shorter --lengths"
            )
        first = int(start * (len(self.tokens) - count + 1))
        text = [*self.tokens[first : first + count], *chain(*common)]
        return Prompt([*before, *self._with_needles(text, needles), *question], answer)

    def _entries(self, word: str, times: int) -> list[list[int]]:
        """The tokens of each entry of a word in a list of words."""
        return [self.pretrained.content_ids(f" {word},")] * times

    def _word_list(
        self, puzzle: Puzzle, common: list[list[int]], count: int, draw: random.Random
    ) -> tuple[list[list[int]], int]:
        """The entries of a list with as many other words as `count` tokens have room for, and how many are left."""
        entries = list(common)
        for word in different_words(draw, [word for word in self.words if word != puzzle.common]):
            more = self._entries(word, UNCOMMON)
            if (size := sum(map(len, more))) > count:
                break
            entries, count = entries + more, count - size
        draw.shuffle(entries)
        return entries, count

    def _ending(self, puzzle: Puzzle) -> tuple[list[int], list[int]]:
        """The tokens of question and answer, as the tokenizer makes them of both together where it can."""
        question = self.pretrained.content_ids(f"\n{puzzle.question}")
        both = self.pretrained.content_ids(f"\n{puzzle.question}{puzzle.answer}")
        if both[: len(question)] == question and len(both) > len(question):
            return question, both[len(question) :]
        return question, self.pretrained.content_ids(puzzle.answer)

    def _with_needles(self, text: list[int], needles: Sequence[tuple[float, list[int]]]) -> list[int]:
        """The text with each fact after the sentence that ends before its depth."""
        tokens: list[int] = []
        done = 0
        for depth, needle in sorted(needles, key=lambda each: each[0]):
            at = max(done, self._sentence_end(text, round(depth * len(text))))
            tokens += text[done:at] + needle
            done = at
        return tokens + text[done:]

    def _sentence_end(self, text: list[int], position: int) -> int:
        """The end of the sentence before a position; the position itself if there is none near it."""
        if position in (0, len(text)):
            return position
        for end in range(position, max(position - SENTENCE, 0), -1):
            if self.pretrained.tokenizer.decode([text[end - 1]]).strip().endswith(ENDS):
                return end
        return position
