"""The pattern of each method: the weights that it applies to 48 tokens, next to those of exact attention."""

import math
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import torch

import subquad as sq
from pictures import matrix
from pictures.svg import FAINT, Picture, width_of
from subquad.tools.measure.fidelity import attention_weights

TOKENS, WIDTH = 48, 32
TOPICS = [0] * 7 + [1] * 6 + [2] * 5 + [0] * 6 + [3] * 7 + [1] * 6 + [2] * 6 + [0] * 5  # of each token
ANSWERS = {31: 9, 40: 20}  # queries with one distant key of their own
FAMILIES = {
    "exact": "Exact: all pairs",
    "clusters": "Clusters",
    "buckets": "Buckets",
    "window": "Windows and patterns",
    "features": "Features",
    "summary": "Summaries",
    "mixture": "Mixtures",
}


@dataclass(frozen=True)
class Pattern:
    """The settings with which a method is drawn, which are small because the input is short, and what to look at."""

    method: str
    caption: str
    causal: bool = False
    heads: tuple[str, ...] = ()  # a name for each head that is drawn, where heads differ


PATTERNS = {
    "full": Pattern("full", "Every query has a weight for every key: 48 × 48 products."),
    "oracle-top": Pattern("oracle-top:topk=6", "Each query keeps its 6 best keys and drops all others."),
    "shared-full": Pattern("shared-full", "The queries are also the keys."),
    "synthesizer": Pattern("synthesizer", "The logits are learned, so products of queries and keys do not matter."),
    "clustered": Pattern("clustered:clusters=8", "All queries of a cluster share one row of weights."),
    "clustered-tail": Pattern(
        "clustered-tail:clusters=8,topk=6,cells=6",
        "Each cluster's top keys are exact for every query; the others are 6 cells, weighted by each query itself.",
    ),
    "i-clustered": Pattern(
        "i-clustered:clusters=8,topk=6",
        "Each query has its own weights on its cluster's top keys; the rest of the row is the cluster's.",
    ),
    "cluster-former": Pattern(
        "cluster-former:window=2,chunk=8,clusters=4", "A window, and chunks of the tokens sorted by cluster."
    ),
    "lha": Pattern("lha:buckets=4", "Queries and keys meet in buckets of a hash function that is learned."),
    "lha-tail": Pattern(
        "lha-tail:buckets=6,keys=8,cells=6", "Keys of a query's learned bucket exactly, the others as cells."
    ),
    "lsh": Pattern("lsh:buckets=4", "Queries and keys meet in buckets of a random hash function."),
    "reformer": Pattern(
        "reformer:rounds=1,chunk=8,buckets=8",
        "Tokens of one bucket meet in chunks; the queries are the keys, and no query sees itself.",
    ),
    "routing": Pattern("routing:clusters=4", "Each centroid takes the tokens nearest to it, and these meet."),
    "sinkhorn": Pattern("sinkhorn:block=8", "A query's own block, and a mixture of all blocks."),
    "smyrf": Pattern("smyrf:clusters=6,rounds=1", "Equal chunks of the sorted queries and the sorted keys meet."),
    "adaptive-span": Pattern(
        "adaptive-span:span=16,ramp=8,start=6", "A window with a soft edge, whose span each head learns.", causal=True
    ),
    "bigbird": Pattern(
        "bigbird:block=4,window=1,random=1", "Near blocks, random blocks, and global blocks at both ends."
    ),
    "fixed": Pattern(
        "fixed:block=8,columns=2", "A query's own block, and the last columns of every block.", causal=True
    ),
    "keep": Pattern("keep:first=1,last=1", "All queries see the kept tokens, and these see all keys."),
    "local": Pattern("local:window=4", "Each query sees the keys at most 4 tokens away."),
    "logsparse": Pattern("logsparse:window=2", "A window, and the keys 1, 2, 4, 8 … tokens away.", causal=True),
    "longformer": Pattern("longformer:window=4", "A window, and a first token that sees and is seen by all."),
    "strided": Pattern("strided:stride=8", "The nearest 8 keys, and every 8th key before them.", causal=True),
    "learned-feature-map": Pattern(
        "learned-feature-map:features=16,window=3", "Near keys and the first token exactly, the others by features."
    ),
    "linear": Pattern("linear", "A fixed feature map in place of the exponential: the weights are almost even."),
    "performer": Pattern("performer:features=64", "Random features of the softmax: right on average, noisy in each."),
    "rfa": Pattern("rfa:features=64", "Random features, with gates that forget distant tokens.", causal=True),
    "linformer": Pattern("linformer:k=12", "Keys are summed into 12 projected keys, which start as means of segments."),
    "nystrom": Pattern(
        "nystrom:landmarks=8", "Weights go through 8 landmarks, which are means of segments; orange is negative."
    ),
    "probsparse": Pattern("probsparse:factor=3", "A few queries are exact, all others take the mean of the values."),
    "tilted-pool": Pattern(
        "tilted-pool:pools=6,window=3", "Near keys and the first token exactly, the others in 6 pools."
    ),
    "by-length": Pattern(
        "by-length:steps=0:full+25:local:window=4",
        "Queries with up to 24 keys are exact; those with more run another method, here a window.",
        causal=True,
    ),
    "mixed-heads": Pattern(
        "mixed-heads:methods=local:window=4+clustered:clusters=8",
        "Each head runs its own method: here a window and clusters.",
        heads=("head 1", "head 2"),
    ),
    "sum": Pattern(
        "local:window=2+keep:first+clustered:clusters=8",
        "A window and the first token exactly, clusters for all other keys; each key counts once.",
    ),
}


def drawn_as(name: str) -> Pattern:
    """The pattern of a method: of one that is not listed above, with the settings of its trait `example`."""
    if name in PATTERNS:
        return PATTERNS[name]
    method = sq.METHODS[name]
    settings = ",".join(f"{key}={value}" for key, value in method.traits.example.items())
    return Pattern(f"{name}:{settings}" if settings else name, (method.__doc__ or "").partition("\n")[0])


@cache
def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys of a made-up text: near tokens attend to each other, and so do tokens of one topic.

    The first key is a sink, two queries have one distant key that they look for, and there is some noise.
    """
    random = np.random.default_rng(0)
    frequencies = random.standard_normal(6) / 2.0
    angles = np.arange(TOKENS)[:, None] * frequencies
    near = np.concatenate([np.cos(angles), np.sin(angles)], 1) / math.sqrt(6)
    topic = np.eye(4)[TOPICS]
    noise = random.standard_normal((2, TOKENS, WIDTH - 20)) / math.sqrt(WIDTH - 20)
    extra = np.zeros((2, TOKENS, 4))
    extra[0, :, 0], extra[1, 0, 0] = 1.0, 2.0
    for i, (query, key) in enumerate(ANSWERS.items()):
        extra[0, query, 1 + i] = extra[1, key, 1 + i] = 2.4
    sides = [np.concatenate([1.5 * near, 1.75 * topic, extra[s], 0.8 * noise[s]], 1) for s in range(2)]
    q, k = (torch.from_numpy(WIDTH**0.25 * side).float()[None, None] for side in sides)
    return q, k


@cache
def weights(name: str) -> np.ndarray:
    """The weights of a method in each head, (heads, queries, keys): what it applies to the values, by its own code."""
    pattern = drawn_as(name)
    return weights_of(pattern.method, pattern.causal, max(len(pattern.heads), 1))


def weights_of(text: str, causal: bool, heads: int = 1) -> np.ndarray:
    """The weights that the method with this text applies, with its initial parameters where it learns."""
    method = sq.parse_method(text)
    q, k = (x.expand(1, heads, TOKENS, WIDTH).contiguous() for x in inputs())
    values = torch.randn(1, heads, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    if method.traits.learned:
        method = method.bind(heads=heads, head_dim=WIDTH, max_length=TOKENS).eval()
    with torch.no_grad():
        return attention_weights(method, q, k, values, is_causal=causal)[0].double().numpy()


@cache
def exact(causal: bool) -> np.ndarray:
    """The weights of exact attention to the same queries and keys."""
    return weights_of("full", causal)[0]


def remark(name: str) -> str:
    """The reason why another picture could have come out: parameters that are not trained, or a random seed."""
    traits = sq.parse_method(drawn_as(name).method).traits
    if traits.learned:
        return "untrained: initial parameters"
    return "one random seed of many" if traits.stochastic else ""


def pattern(name: str) -> str:
    """The picture of one method."""
    drawn, cell = drawn_as(name), 5
    side, left, top, gap = TOKENS * cell, 30, 62, 24
    mask = ", causal" if drawn.causal else ""
    panels = [(f"exact attention{mask}", exact(drawn.causal))]
    others = weights(name)
    heads = drawn.heads or ("",)
    if name == "full":
        panels, heads = [], ("exact attention",)
    panels += [(head or name + mask, each) for head, each in zip(heads, others, strict=True)]
    width = max(left + len(panels) * (side + gap), 440)
    picture = Picture(width, top + side + 54, f"Attention weights of {name}", about(name))
    picture.text(left, 20, drawn.method, size=13, mono=True)
    picture.text(width - gap, 20, remark(name), size=11, fill=FAINT, anchor="end")
    for i, (title, each) in enumerate(panels):
        x = left + i * (side + gap)
        picture.text(x, top - 10, title, bold=True)
        picture.text(x + side, top - 10, "keys →", size=10, fill=FAINT, anchor="end")
        matrix.draw(picture, matrix.levels_of(each), x, top, cell)
    picture.add(
        f'<text transform="translate(20 {top + 46}) rotate(-90)" font-size="10" fill="{FAINT}">← queries</text>'
    )
    picture.lines(left, top + side + 24, wrapped(drawn.caption, width - left - 180))
    matrix.scale(picture, width - gap - 112, top + side + 24)
    picture.text(width - gap - 118, top + side + 24, "weight", size=10, fill=FAINT, anchor="end")
    return picture.svg()


def wrapped(text: str, width: float) -> list[str]:
    """A caption in lines that are not wider than this."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        lines[-1:] = [longer] if width_of(longer, 12) <= width else [lines[-1], word]
    return lines


def about(name: str) -> str:
    """The description of a method's picture for those who do not see it."""
    drawn = drawn_as(name)
    note = f" ({remark(name)})" if remark(name) else ""
    return (
        f"The weights that {drawn.method}{note} gives {TOKENS} keys, a row for each of {TOKENS} queries, next to those "
        f"of exact attention{' under a causal mask' if drawn.causal else ''}. {drawn.caption}"
    )


SHEET = (("exact", "clusters"), ("buckets",), ("window",), ("features", "summary"), ("mixture",))  # families in a row

NOTES = (
    "Rows are queries and columns are keys, the same 48 tokens for all methods;",
    "triangles are under a causal mask. Methods that learn have their initial",
    "parameters, and mixed-heads shows one of its heads.",
)


def sheet() -> str:
    """All methods on one sheet, by families."""
    cell, left, gap, head = 2, 20, 14, 46
    side = cell * TOKENS
    members = {family: [n for n, method in sq.METHODS.items() if method.traits.family == family] for family in FAMILIES}
    columns = max(sum(len(members[family]) for family in families) for families in SHEET)
    width, height = left + columns * (side + gap) + 6, 4 + len(SHEET) * (side + head + 12)
    about = f"Weights of all {len(sq.METHODS)} methods of the library for the same queries and keys, by families."
    picture = Picture(width, height, "Attention weights of all methods", about)
    for row, families in enumerate(SHEET):
        column, top = 0, head + row * (side + head + 12)
        for family in families:
            picture.text(left + column * (side + gap), top - 22, FAMILIES[family], size=13, bold=True)
            for name in members[family]:
                x, column = left + column * (side + gap), column + 1
                picture.text(x, top - 5, name, size=9, mono=True)
                matrix.draw(picture, matrix.levels_of(weights(name)[-1]), x, top, cell)
    x = left + 4 * (side + gap)
    picture.lines(x, top + 8, NOTES, size=11)
    matrix.scale(picture, x, top + 74)
    picture.text(
        x + 124, top + 74, "weight; white: pairs that are never counted; orange: negative", size=10, fill=FAINT
    )
    return picture.svg()


# path below docs/assets/pictures -> what draws it
FILES = {f"patterns/{name}.svg": partial(pattern, name) for name in sq.METHODS} | {"all-methods.svg": sheet}
