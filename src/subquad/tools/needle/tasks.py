"""Retrieval tasks: facts to put into a text, a question about them, and its answer.

Everything is made from a random generator. The numbers and the made-up words are unlikely in the text, so only the
facts have the answer. The tasks follow Mohtashami and Jaggi 2023, arXiv 2305.16300 (passkey), and Hsieh et al. 2024,
"RULER", arXiv 2404.06654 (several keys, variable tracking, frequent words).
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

KEYS = 4  # facts of the task `keys`
CHAIN = 3  # variables that have one value
COUNTS = (8, 4, 2)  # how often each word of the task `frequent` is named
NAMES = ("amber", "birch", "cobalt", "daisy", "ember", "fennel", "garnet", "hazel", "indigo", "maple", "opal")


@dataclass(frozen=True)
class Puzzle:
    """Needles, the facts to find, with their depths; the question at the end of the prompt, and the answer after it.

    A depth is the position of a fact in the text: 0 at its beginning, 1 at its end.
    """

    needles: list[tuple[float, str]]
    question: str
    answer: str


@dataclass(frozen=True)
class NeedleTask:
    """A task by its name; `make` gets a depth of 0 where the facts are all over the text (`spread`)."""

    name: str
    meaning: str
    make: Callable[[random.Random, float], Puzzle]
    spread: bool = False


def passkey(draw: random.Random, depth: float) -> Puzzle:
    """One fact, at the depth."""
    key = _number(draw)
    return Puzzle(
        [(depth, f"The pass key is: {key}. Remember it: {key} is the pass key.")],
        "What is the pass key? The pass key is:",
        f" {key}",
    )


def keys(draw: random.Random, depth: float) -> Puzzle:
    """Several keys with names; the one that is asked for is at the depth, the others are at random."""
    names = draw.sample(NAMES, KEYS)
    values = {name: _number(draw) for name in names}
    needles = [(draw.random(), f"The {name} key is: {values[name]}.") for name in names[1:]]
    asked = names[0]
    return Puzzle(
        [*needles, (depth, f"The {asked} key is: {values[asked]}.")],
        f"What is the {asked} key? The {asked} key is:",
        f" {values[asked]}",
    )


def variables(draw: random.Random, depth: float) -> Puzzle:
    """Two chains X1 = number, X2 = X1, X3 = X2, in their order; the one that is asked for begins at the depth."""
    names = [f"X{number}" for number in draw.sample(range(10, 100), 2 * CHAIN)]
    value, needles = _number(draw), []
    for chain, start, first in ((names[:CHAIN], depth, value), (names[CHAIN:], draw.random(), _number(draw))):
        for step, name in enumerate(chain):
            at = start + (1 - start) * step / CHAIN
            needles.append((at, f"The variable {name} is: {chain[step - 1] if step else first}."))
    last = names[CHAIN - 1]
    return Puzzle(needles, f"Which number is the variable {last}? As a number, the variable {last} is:", f" {value}")


def frequent(draw: random.Random, depth: float) -> Puzzle:
    """Made-up words at random all over the text, of which the most frequent is asked for."""
    words: list[str] = []
    while len(words) < len(COUNTS):
        word = "".join(draw.choice("bdfgklmnprstvz") + draw.choice("aeiou") for _ in range(3))
        words += [word] if word not in words else []
    named = [word for word, count in zip(words, COUNTS, strict=True) for _ in range(count)]
    return Puzzle(
        [(draw.random(), f"The word is: {word}.") for word in named],
        "Which word was named most often? The word is:",
        f" {words[0]}",
    )


def _number(draw: random.Random) -> str:
    return str(draw.randrange(10_000, 100_000))


TASKS = {
    task.name: task
    for task in (
        NeedleTask("passkey", "one number, named at a depth of the text", passkey),
        NeedleTask("keys", f"one of {KEYS} numbers, by its name", keys),
        NeedleTask("variables", f"the number that a variable has through a chain of {CHAIN}; two chains", variables),
        NeedleTask("frequent", "the most frequent of some made-up words, all over the text", frequent, spread=True),
    )
}
