"""ListOps (Nangia and Bowman 2018): nested lists of digits under MIN, MAX, MED and SM, as LRA makes them.

`[MAX 4 [MIN 2 3 ] 1 0 ]` is 4. LRA (Tay et al. 2020) draws trees: a node is an operator with probability ¼, at the last
level never; an operator has 2 to 10 arguments; it keeps a tree when its expression has more than 500 and fewer than
2,000 tokens. Parentheses, which the first data had around every argument, are left out. MED is the median, rounded
down; SM the sum modulo 10.
"""

import gzip
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from subquad.core.errors import InputError
from subquad.core.reading import read_bytes

OPERATORS = ("MIN", "MAX", "MED", "SM")
MIN, MAX, MED, SM, END = range(10, 15)
SYMBOLS = (*"0123456789", *(f"[{name}" for name in OPERATORS), "]")  # 15 of them, by their numbers
AT_ONCE = (
    4,
    8,
    16,
    32,
    64,
)  # trees drawn together: few at first, as short ones soon fit; then the last, again and again
MOST = 20_000  # draws, before an error reports that no tree has that size

Symbols = list[int]


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The parameters of the random expressions.

    Attributes:
        shortest, longest: tokens of an expression, both included.
        depth: levels of a tree, that of the deepest digits included.
        arguments: the most that an operator has; the fewest are 2.
        operators: the probability that an argument is an operator with its own arguments.
    """

    shortest: int = 501
    longest: int = 1999
    depth: int = 10
    arguments: int = 10
    operators: float = 0.25

    def __post_init__(self) -> None:
        if self.depth < 2 or self.arguments < 2:
            raise ValueError(f"depth={self.depth} and arguments={self.arguments} must be at least 2")
        if not 0.0 <= self.operators <= 1.0:
            raise ValueError(f"operators={self.operators}, but it must be a probability from 0 to 1")
        if not 4 <= self.shortest <= self.longest:
            raise ValueError(
                f"shortest={self.shortest} and longest={self.longest}: an expression has 4 tokens or more, and the "
                "shortest no more than the longest"
            )
        # Nodes of a level for each node of the level above, on average; memory ends before growing trees do.
        growth, most = self.operators * (2 + self.arguments) / 2, 100_000
        if growth > 1 and (self.depth - 1) * math.log(growth) > math.log(most):
            raise ValueError(
                f"depth={self.depth}, arguments={self.arguments} and operators={self.operators} make trees of more "
                f"than {most:,} nodes on the last level; give fewer of one of them"
            )


def expression(rules: Rules, draw: np.random.Generator) -> Symbols:
    """One expression by the rules.

    Trees are drawn without their digits first: a size that does not fit is found before anything is written down.

    Raises:
        ValueError: no tree of these sizes was found.
    """
    for attempt in range(MOST):
        levels, starts = _trees(rules, draw, AT_ONCE[min(attempt, len(AT_ONCE) - 1)])
        if starts is not None:
            return _written(levels, starts, draw)
    raise ValueError(
        f"in {MOST:,} draws of trees with depth={rules.depth}, arguments={rules.arguments} and "
        f"operators={rules.operators} none had {rules.shortest} to {rules.longest} tokens; allow other sizes"
    )


def evaluate(symbols: Sequence[int]) -> int:
    """The value of an expression.

    Raises:
        ValueError: brackets that do not match.
    """
    operators: list[int] = []
    arguments: list[list[int]] = [[]]
    for symbol in symbols:
        if symbol < 10:
            arguments[-1].append(symbol)
        elif symbol != END:
            operators.append(symbol)
            arguments.append([])
        elif operators and arguments[-1]:
            value = apply(operators.pop(), arguments.pop())
            arguments[-1].append(value)
        else:
            raise ValueError("the expression closes a list that is not open, or an empty one")
    if operators or len(arguments[0]) != 1:
        raise ValueError("the expression is not one digit or one closed list")
    return arguments[0][0]


def apply(operator: int, digits: Sequence[int]) -> int:
    """An operator on its arguments."""
    if operator == MIN:
        return min(digits)
    if operator == MAX:
        return max(digits)
    if operator == SM:
        return sum(digits) % 10
    ordered = sorted(digits)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) // 2


def depth_of(symbols: Sequence[int]) -> int:
    """Levels of the tree, that of the deepest digits included: 2 for one list of digits."""
    steps = [(symbol not in range(10)) - 2 * (symbol == END) for symbol in symbols]
    return 1 + int(np.cumsum(steps).max())


def root_digits(symbols: Sequence[int]) -> list[int]:
    """Those arguments of the outermost operator that are digits."""
    digits, level = [], 0
    for symbol in symbols:
        if symbol < 10 and level == 1:
            digits.append(symbol)
        level += (MIN <= symbol <= SM) - (symbol == END)
    return digits


def parse(text: str) -> Symbols:
    """Symbols of a written expression; parentheses are left out.

    Raises:
        ValueError: a word that is not a symbol.
    """
    return [SYMBOLS.index(word) for word in text.split() if word not in "()"]


def read_listops(path: Path) -> Iterator[tuple[Symbols, int]]:
    """(expression, label) of a file of lines "label TAB expression", gzipped or not.

    Raises:
        InputError: no such file, or a line that is not of this form; named.
    """
    try:
        content = read_bytes(path)
        lines = (gzip.decompress(content) if path.suffix == ".gz" else content).decode().rstrip("\n").split("\n")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read as ListOps: {error}") from None
    for number, line in enumerate(lines, 1):
        label, _, text = line.partition("\t")
        try:
            yield parse(text), int(label)
        except ValueError:
            raise InputError(f"{path}, line {number}: not a label, a tab and an expression") from None


def _trees(rules: Rules, draw: np.random.Generator, count: int) -> tuple[list[np.ndarray], list[int] | None]:
    """Arguments of each node, level by level, of `count` trees drawn together; 0: a digit.

    With it where, on each level, the first tree of a size that fits begins; None: none does. The outermost node is an
    operator: a single digit is of no size that fits.
    """
    tree = np.arange(count)  # of each node on this level
    levels, owners = [], []
    for level in range(rules.depth):
        inner = level < rules.depth - 1
        chance = 1.0 if level == 0 else rules.operators if inner else 0.0
        operator = draw.random(len(tree)) < chance
        arguments = np.where(operator, draw.integers(2, rules.arguments + 1, len(tree)), 0)
        levels.append(arguments)
        owners.append(tree)
        tree = np.repeat(tree, arguments)
        if not len(tree):
            break
    sizes = sum(
        np.bincount(tree, weights=1 + (arguments > 0), minlength=count)
        for tree, arguments in zip(owners, levels, strict=True)
    )
    fits = np.flatnonzero((sizes >= rules.shortest) & (sizes <= rules.longest))
    return levels, [int(np.searchsorted(tree, fits[0])) for tree in owners] if len(fits) else None


def _written(levels: list[np.ndarray], starts: list[int], draw: np.random.Generator) -> Symbols:
    """The tree that begins at these places, as symbols: the order in depth is the order on each level."""
    following = [iter(arguments[start:].tolist()) for arguments, start in zip(levels, starts, strict=True)]
    digits, operators = _endless(draw, 0, 10), _endless(draw, MIN, END)
    symbols: Symbols = []
    left = [1]  # nodes that are still to be written, of each list that is open
    while left:
        if not left[-1]:
            left.pop()
            symbols.append(END)
            continue
        left[-1] -= 1
        arguments = next(following[len(left) - 1])
        if arguments:
            left.append(arguments)
        symbols.append(next(operators if arguments else digits))
    return symbols[:-1]  # the tree itself is in no list


def _endless(draw: np.random.Generator, low: int, end: int) -> Iterator[int]:
    """Numbers drawn evenly, many at a time."""
    while True:
        yield from draw.integers(low, end, 256).tolist()
