"""Matrices of attention weights as drawings: few levels of colour, each level one path of horizontal runs."""

import re

import numpy as np

from pictures.svg import ORANGE, Picture

# White is a weight of exactly 0, a pair that the method never counts. Then the square root of the weight, in steps.
COLORS = ("#ffffff", "#eaf2fa", "#cfe1f2", "#a5cde3", "#6aaed6", "#3787c0", "#145ea8", "#08306b")
NEGATIVE = ORANGE
MOST = 0.4  # weights from here on have the darkest colour
STEPS = (np.linspace(0.0, 1.0, len(COLORS))[1:-1] ** 2) * MOST  # the least weight of levels 2, 3, …
NOTHING = 1e-12

Levels = np.ndarray


def levels_of(weights: np.ndarray) -> Levels:
    """The level of colour of each weight, an index into COLORS; −1 for a negative weight that can be seen."""
    levels = np.where(weights > NOTHING, 1 + np.searchsorted(STEPS, weights, side="right"), 0)
    return np.where(weights < -STEPS[0] / 4, -1, np.where(weights < -NOTHING, 1, levels))


def draw(picture: Picture, levels: Levels, x: float, y: float, cell: float) -> None:
    """Add a matrix whose upper left corner is at (x, y)."""
    rows, columns = levels.shape
    background = int(np.bincount(levels[levels >= 0]).argmax())
    picture.add(f'<g transform="translate({x:g} {y:g}) scale({cell:g})" stroke-width="1" shape-rendering="crispEdges">')
    picture.add(f'<path fill="{COLORS[background]}" d="M0 0h{columns}v{rows}H0z"/>')
    for level in sorted(set(levels.flat) - {background}):
        color = COLORS[level] if level >= 0 else NEGATIVE
        picture.add(f'<path stroke="{color}" d="{runs(levels == level)}"/>')
    picture.add("</g>")
    edge = f"M{x - 0.5:g} {y - 0.5:g}h{columns * cell + 1:g}v{rows * cell + 1:g}h-{columns * cell + 1:g}z"
    picture.path(edge, width=1)


def runs(cells: np.ndarray) -> str:
    """A path along all cells that are true, one piece for each horizontal run."""
    path = []
    for i, row in enumerate(cells):
        edges = np.flatnonzero(np.diff(row.astype(int), prepend=0, append=0))
        end = None
        for start, stop in edges.reshape(-1, 2).tolist():
            path.append(f"M{start} {i}.5h{stop - start}" if end is None else f"m{start - end} 0h{stop - start}")
            end = stop
    return "".join(path)


def read(svg: str) -> list[Levels]:
    """The matrices of a drawing again, which is how a test compares it with what the methods compute today."""
    matrices = []
    for group in re.findall(r'<g transform="translate[^>]*>\n(.*?)</g>', svg, re.DOTALL):
        color, columns, rows = re.search(r'fill="(#\w+)" d="M0 0h(\d+)v(\d+)', group).groups()  # type: ignore[union-attr]
        levels = np.full((int(rows), int(columns)), COLORS.index(color))
        for color, path in re.findall(r'stroke="(#\w+)" d="([^"]+)"', group):
            at = row = 0
            for kind, x, y, run in re.findall(r"([Mm])(\d+) (\d+)(?:\.5)?h(\d+)", path):
                at, row = (int(x), int(y)) if kind == "M" else (at + int(x), row)
                levels[row, at : at + int(run)] = -1 if color == NEGATIVE else COLORS.index(color)
                at += int(run)
        matrices.append(levels)
    return matrices


def scale(picture: Picture, x: float, y: float) -> None:
    """A legend of the colours."""
    for i, color in enumerate(COLORS):
        picture.rect(x + 14 * i, y - 10, 14, 11, color, "#c8d0d8")
    picture.text(x + 7, y + 13, "0", size=10, anchor="middle")
    picture.text(x + 14 * len(COLORS), y + 13, f"≥ {MOST}", size=10, anchor="end")
