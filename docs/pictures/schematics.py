"""Drawings of how methods work: clusters, causal attention by halves, and what `swap` replaces."""

from pictures.svg import (
    BLUE,
    FAINT,
    GREEN,
    GREY,
    LINE,
    ORANGE,
    PALE_BLUE,
    PALE_GREEN,
    PALE_ORANGE,
    PAPER,
    Picture,
)

CLUSTERS = (3, 4, 2)  # queries of each cluster
TOP = ((1, 2), (5, 8), (2, 10))  # the top keys of each cluster
CELLS = (0, 0, 1, 0, 1, 1, 2, 2, 1, 2, 2, 0)  # the cell of each key
SHADES = (0.25, 0.4, 0.55, 0.7, 0.85)


def shade(*where: int) -> float:
    """An opacity that differs from place to place, always in the same way."""
    mixed = 7
    for each in where:
        mixed = mixed * 31 + each * 17 + 5
    return SHADES[mixed % 97 % len(SHADES)]


def clusters() -> str:
    """Three matrices: clustered, i-clustered and clustered-tail."""
    about = (
        "Which weights three methods compute, for nine queries in three clusters and twelve keys. clustered: one row "
        "for each cluster, shared by its queries. i-clustered: the same, but each query has its own weights on the top "
        "keys of its cluster. clustered-tail: also its own weight for each cell of the other keys."
    )
    picture = Picture(900, 350, "From clustered to i-clustered to clustered-tail", about)
    panels = {
        "clustered": ("One row of weights per cluster;", "its queries share the row."),
        "i-clustered": ("Each query has its own weights on", "its cluster's top keys; their sum", "is the cluster's."),
        "clustered-tail": (
            "The other keys form cells, and each",
            "query has its own weight for every",
            "cell, in one softmax with the top keys.",
        ),
    }
    cell, top = 18, 60
    for i, (name, texts) in enumerate(panels.items()):
        left = 74 + 280 * i
        picture.text(left, 24, name, size=14, bold=True, mono=True)
        picture.text(left + 12 * cell, top - 8, "keys →", size=10, fill=FAINT, anchor="end")
        rows(picture, name, left, top, cell)
        picture.lines(left, top + 9 * cell + 34, texts)
        if i:
            picture.arrow([(left - 44, top + 81), (left - 18, top + 81)])
    y = top
    for j, members in enumerate(CLUSTERS):
        middle = y + members * cell / 2
        picture.path(f"M64 {y + 2}h-6v{members * cell - 4}h6", FAINT)
        picture.text(52, middle + 4, f"cluster {j + 1}", size=10, fill=FAINT, anchor="end")
        y += members * cell + 4
    legend = (
        (BLUE, "a query's own product with a key: exact"),
        (ORANGE, "the weight of its cluster's mean query"),
        (GREEN, "the weight of a cell, for each query"),
    )
    x = 74.0
    for color, text in legend:
        picture.rect(x, 324, 12, 12, color)
        picture.text(x + 18, 334, text, size=11)
        x += 280
    return picture.svg()


def rows(picture: Picture, name: str, left: float, top: float, cell: float) -> None:
    """The matrix of one method, a little apart between clusters."""
    squares: dict[tuple[str, float], list[str]] = {}
    y, query = top, 0
    for j, members in enumerate(CLUSTERS):
        for _ in range(members):
            for key in range(len(CELLS)):
                if name != "clustered" and key in TOP[j]:
                    look = BLUE, shade(1, query, key)
                elif name == "clustered-tail":
                    look = GREEN, shade(2, query, CELLS[key])
                else:
                    look = ORANGE, shade(3, j, key)
                squares.setdefault(look, []).append(
                    f"M{left + key * cell:g} {y:g}h{cell - 1:g}v{cell - 1:g}h{1 - cell:g}z"
                )
            y, query = y + cell, query + 1
        y += 4
    for (color, opacity), paths in squares.items():
        picture.add(f'<path fill="{color}" fill-opacity="{opacity}" d="{"".join(paths)}"/>')


def halves() -> str:
    """The triangle of causal attention, cut into exact blocks, rectangles and the last rows."""
    about = (
        "Causal attention to eight blocks of tokens. The blocks on the diagonal and the last rows are exact. What is "
        "left below the diagonal is one rectangle of 4 by 4 blocks, two of 2 by 2 and four of one block, and each is "
        "attended to by clusters. Nothing above the diagonal is computed."
    )
    picture = Picture(720, 400, "Causal attention by halves", about)
    left, top, block, count = 70, 44, 40, 8
    side = block * count
    picture.rect(left, top, side, side, GREY)
    tints = {4: "#f3b98f", 2: "#f8d3b7", 1: PALE_ORANGE}
    for size, tint in tints.items():
        for start in range(0, count, 2 * size):
            x, y = left + start * block, top + (start + size) * block
            picture.rect(x, y, size * block, size * block, tint, ORANGE)
            if size > 1:
                picture.text(x + size * block / 2, y + size * block / 2 + 4, "clusters", anchor="middle")
    for i in range(count):
        picture.rect(left + i * block, top + i * block, block, block, PALE_BLUE, BLUE)
    picture.rect(left, top + side - 7, side, 7, BLUE)
    picture.text(left + side * 0.72, top + side * 0.3, "later keys: not seen", anchor="middle", fill=FAINT)
    for i, text in enumerate(("0", "half", "all")):
        picture.text(left + i * side / 2, top - 8, text, size=10, fill=FAINT, anchor="middle")
        picture.text(left - 8, top + i * side / 2 + 4, text, size=10, fill=FAINT, anchor="end")
    picture.text(left + side / 4, top - 8, "keys →", size=10, fill=FAINT, anchor="middle")
    picture.text(left - 8, top + side / 4, "queries ↓", size=10, fill=FAINT, anchor="end")
    notes = (
        (
            PALE_BLUE,
            BLUE,
            (
                "Blocks on the diagonal are exact.",
                "The setting block is their size: 1,024",
                "tokens, and 2,048 in bf16 and fp16.",
            ),
        ),
        (
            tints[4],
            ORANGE,
            ("Queries of the second half and keys of the", "first half: a rectangle without a mask,", "by the method."),
        ),
        (
            tints[2],
            ORANGE,
            (
                "Each half is divided in the same way,",
                "down to the blocks. All rectangles of one",
                "size are one batch.",
            ),
        ),
        (BLUE, BLUE, ("The last queries (by default 128) are exact", "over all keys: a prompt's question is there.")),
    )
    y = top + 20
    for fill, stroke, texts in notes:
        picture.rect(left + side + 34, y - 10, 14, 14, fill, stroke)
        picture.lines(left + side + 58, y + 1, texts)
        y += 26 + 16 * len(texts)
    picture.lines(left + side + 34, y + 8, ("The parts of a row are merged by their", "log-sum-exp."), fill=FAINT)
    return picture.svg()


def swap() -> str:
    """A layer of a transformer before and after `sq.hf.swap`."""
    about = (
        "A layer of a transformer before and after sq.hf.swap. The projections of queries, keys and values, the output "
        "projection, the norms and the feed-forward network are the same modules with the same weights. The attention "
        "between them, which has no weights, was SDPA and is now clustered-tail."
    )
    picture = Picture(860, 470, "What swap replaces in a layer", about)
    for left, title, inner in (
        (20, "before", ("scaled_dot_product_attention", "exact, N·M products")),
        (500, "after", ("clustered-tail", "the method's own products")),
    ):
        picture.text(left, 24, title, size=14, bold=True)
        layer(
            picture, left, inner, PALE_BLUE if title == "before" else PALE_GREEN, BLUE if title == "before" else GREEN
        )
    picture.text(430, 212, 'sq.hf.swap(model, "…")', size=9, mono=True, anchor="middle")
    picture.arrow([(372, 222), (488, 222)])
    picture.arrow([(488, 248), (372, 248)])
    picture.text(430, 266, "sq.hf.restore(model)", size=9, mono=True, anchor="middle")
    picture.rect(20, 442, 12, 12, GREY, LINE)
    picture.text(40, 452, "modules with weights: untouched")
    picture.rect(260, 442, 12, 12, PALE_GREEN, GREEN)
    picture.text(280, 452, "the function between them: replaced. It has no weights, unless the method learns some.")
    return picture.svg()


def layer(picture: Picture, left: float, inner: tuple[str, ...], fill: str, stroke: str) -> None:
    """One layer, from its input at the bottom to its output at the top."""
    middle = left + 170
    picture.rect(left, 40, 340, 384, PAPER, LINE, radius=8)
    picture.box(left + 80, 56, 180, 34, ("norm, feed-forward",))
    picture.box(left + 80, 116, 180, 34, ("output projection",))
    picture.box(left + 50, 196, 240, 76, inner, fill=fill, stroke=stroke, mono=1, bold=1)
    for i, name in enumerate(("query", "key", "value")):
        x = left + 20 + 104 * i
        picture.box(x, 318, 92, 40, (name, "projection"))
        picture.arrow([(x + 46, 318), (x + 46, 276)] if i == 1 else bent(x + 46, middle + 70 * (i - 1)))
        picture.arrow([(middle, 404), (middle, 384), (x + 46, 384), (x + 46, 362)])
    picture.arrow([(middle, 196), (middle, 154)])
    picture.arrow([(middle, 116), (middle, 94)])
    picture.text(middle, 419, "hidden states", size=11, anchor="middle", fill=FAINT)


def bent(x: float, target: float) -> list[tuple[float, float]]:
    """The points of an arrow from a projection to the attention above it."""
    return [(x, 318), (x, 298), (target, 298), (target, 276)]


# path below docs/assets/pictures -> what draws it
FILES = {"clusters.svg": clusters, "halves.svg": halves, "swap.svg": swap}
