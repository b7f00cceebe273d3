"""Tasks on long prompts: facts to put into a text, a question about them, and its answer.

Everything is made from a random generator. The numbers and the made-up words are unlikely in the text, so only the
facts have the answer. The tasks have the names of Hsieh et al. 2024, "RULER", arXiv 2404.06654, and an answer that is a
single text, so that its likelihood can be measured. `cwe` and `fwe` follow the port of RULER in lm-evaluation-harness,
the others descriptions of RULER.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from subquad.core.spelling import listed

NUMBERS = 4  # named numbers of the tasks `niah_multi…`
CHAIN = 3  # variables that have one value
COUNTS = (8, 4, 2)  # how often each word of the task `fwe` is named
COMMON, UNCOMMON = 30, 3  # how often the common word of the task `cwe` is in its list, and each other word
NAMES = ("amber", "birch", "cobalt", "daisy", "ember", "fennel", "garnet", "hazel", "indigo", "maple", "opal")


@dataclass(frozen=True)
class Puzzle:
    """Needles, the facts to find, with their depths; the question at the end of the prompt, and the answer after it.

    A depth is the position of a fact in the text: 0 at its beginning, 1 at its end. With a word in `common`, a list of
    words, in which this one is the most frequent, takes the place of the text.
    """

    needles: list[tuple[float, str]]
    question: str
    answer: str
    common: str = ""


@dataclass(frozen=True)
class NeedleTask:
    """A task by its name.

    `make` gets a generator, a depth, which is 0 if the facts are all over the text (`spread`), and the words that the
    user's text has.
    """

    name: str
    meaning: str
    make: Callable[[random.Random, float, Sequence[str]], Puzzle]
    spread: bool = False


def niah_single(draw: random.Random, depth: float, words: Sequence[str]) -> Puzzle:
    """One fact, at the depth."""
    key = _number(draw)
    return Puzzle(
        [(depth, f"The pass key is: {key}. Remember it: {key} is the pass key.")],
        "What is the pass key? The pass key is:",
        f" {key}",
    )


def niah_multikey(draw: random.Random, depth: float, words: Sequence[str]) -> Puzzle:
    """Several numbers with names; the one that is asked for is at the depth, the others are at random."""
    values, needles = _named_numbers(draw, depth)
    asked = next(iter(values))
    return Puzzle(needles, f"What is the {asked} key? The {asked} key is:", f" {values[asked]}")


def niah_multivalue(draw: random.Random, depth: float, words: Sequence[str]) -> Puzzle:
    """Several numbers with one name, of which all are asked for; they begin at the depth."""
    name, values = draw.choice(NAMES), [_number(draw) for _ in range(NUMBERS)]
    return Puzzle(
        [(at, f"One of the {name} keys is: {value}.") for at, value in zip(_from(depth, NUMBERS), values, strict=True)],
        f"What are the {NUMBERS} {name} keys, in their order? The {name} keys are:",
        f" {', '.join(values)}",
    )


def niah_multiquery(draw: random.Random, depth: float, words: Sequence[str]) -> Puzzle:
    """Several numbers with names, of which all are asked for; the first one is at the depth, the others at random."""
    values, needles = _named_numbers(draw, depth)
    asked = f"{listed(list(values))} keys"
    return Puzzle(needles, f"What are the {asked}? The {asked} are:", f" {', '.join(values.values())}")


def vt(draw: random.Random, depth: float, words: Sequence[str]) -> Puzzle:
    """Two chains X1 = number, X2 = X1, X3 = X2, in their order; the one that is asked for begins at the depth."""
    names = [f"X{number}" for number in draw.sample(range(10, 100), 2 * CHAIN)]
    value, needles = _number(draw), []
    for chain, start, first in ((names[:CHAIN], depth, value), (names[CHAIN:], draw.random(), _number(draw))):
        for step, (at, name) in enumerate(zip(_from(start, CHAIN), chain, strict=True)):
            needles.append((at, f"The variable {name} is: {chain[step - 1] if step else first}."))
    last = names[CHAIN - 1]
    return Puzzle(needles, f"Which number is the variable {last}? As a number, the variable {last} is:", f" {value}")


def cwe(draw: random.Random, depth: float, words: Sequence[str]) -> Puzzle:
    """A list of words of the user's text, of which one is in it more often than all others."""
    common = next(different_words(draw, words))
    return Puzzle([], "Which word appears most often in this list of words? The word is:", f" {common}", common)


def fwe(draw: random.Random, depth: float, words: Sequence[str]) -> Puzzle:
    """Made-up words at random all over the text, of which the most frequent is asked for."""
    made_up = different_words(draw, [])
    named = [(next(made_up), count) for count in COUNTS]
    return Puzzle(
        [(draw.random(), f"The word is: {word}.") for word, count in named for _ in range(count)],
        "Which word was named most often? The word is:",
        f" {named[0][0]}",
    )


def different_words(draw: random.Random, words: Sequence[str]) -> Iterator[str]:
    """Yields words in a random order, and then made-up ones without an end, each word once."""
    yielded = draw.sample(words, len(words))
    yield from yielded
    known = set(yielded)
    while True:
        word = "".join(draw.choice("bdfgklmnprstvz") + draw.choice("aeiou") for _ in range(3))
        if word not in known:
            known.add(word)
            yield word


def _named_numbers(draw: random.Random, depth: float) -> tuple[dict[str, str], list[tuple[float, str]]]:
    """Numbers by their names, with their facts: the first number is at the depth, the others are at random."""
    values = {name: _number(draw) for name in draw.sample(NAMES, NUMBERS)}
    depths = [depth, *(draw.random() for _ in range(NUMBERS - 1))]
    return values, [(at, f"The {name} key is: {values[name]}.") for at, name in zip(depths, values, strict=True)]


def _from(depth: float, count: int) -> list[float]:
    """The depths of facts that begin at a depth, with equal distances to each other and to the end of the text."""
    return [depth + (1 - depth) * number / count for number in range(count)]


def _number(draw: random.Random) -> str:
    return str(draw.randrange(10_000, 100_000))


TASKS = {
    task.name: task
    for task in (
        NeedleTask("niah_single", "one number, named at a depth of the text", niah_single),
        NeedleTask("niah_multikey", f"one of {NUMBERS} numbers, by its name", niah_multikey),
        NeedleTask("niah_multivalue", f"all of {NUMBERS} numbers with one name", niah_multivalue),
        NeedleTask("niah_multiquery", f"all of {NUMBERS} numbers, by their names", niah_multiquery),
        NeedleTask("vt", f"the number that a variable has through a chain of {CHAIN}; two chains", vt),
        NeedleTask("cwe", "the most frequent word in a list of the text's words instead of the text", cwe, spread=True),
        NeedleTask("fwe", "the most frequent of some made-up words, all over the text", fwe, spread=True),
    )
}
