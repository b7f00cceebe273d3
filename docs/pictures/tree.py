"""The decision tree of docs/how-to/choose.md."""

from dataclasses import dataclass

from pictures.svg import FAINT, GREY, LINE, PALE_BLUE, PALE_GREEN, PALE_ORANGE, Picture


@dataclass(frozen=True)
class Question:
    """Lines of a question, and for each answer what follows: another question or a method with a remark."""

    lines: tuple[str, ...]
    answers: "tuple[tuple[str, Question | Leaf], ...]"


@dataclass(frozen=True)
class Leaf:
    """A leaf of the tree: the method to use, as on the command line, and why."""

    method: str
    remark: str
    fill: str = PALE_GREEN


ENCODER = Question(
    ("A pretrained encoder:", "what matters most?"),
    (
        ("closeness", Leaf("clustered-tail", "no calibration; speech: window=8")),
        ("speed", Leaf("i-clustered", "no calibration, 25 to 100 clusters")),
        ("linear cost", Leaf("tilted-pool", "some minutes of calibration")),
    ),
)
DECODER = Question(
    ("A pretrained decoder:", "what is needed?"),
    (
        ("long prompts", Leaf("clustered-tail", "prefill; from about 8,192 tokens on")),
        ("a state of fixed size", Leaf("learned-feature-map", "some minutes of calibration")),
        ("nearby tokens suffice", Leaf("local", "no calibration")),
    ),
)
TRAINED = Question(
    ("A model that you train:", "what is needed?"),
    (
        ("closest to softmax", Leaf("clustered-tail", "causal: queries=earlier,last=0", PALE_ORANGE)),
        ("fixed length, lowest cost", Leaf("linformer", "an encoder", PALE_ORANGE)),
        ("a token that sees all", Leaf("longformer, bigbird", "long documents", PALE_ORANGE)),
        ("a state of fixed size", Leaf("linear, rfa, performer", "a decoder", PALE_ORANGE)),
        ("learned hashing", Leaf("mixed-heads", "of local and lha", PALE_ORANGE)),
        ("data with a period", Leaf("strided", "images by rows, audio", PALE_ORANGE)),
    ),
)
TREE = Question(
    ("Longer than the crossover,", "no bias or dense mask, and", "outputs may change?"),
    (
        ("no", Leaf("full:kernel=subquad", "exact; on CPUs, faster than SDPA", PALE_BLUE)),
        (
            "yes",
            Question(("Which", "model?"), (("", ENCODER), ("", DECODER), ("", TRAINED))),
        ),
    ),
)
STEP = 46  # pixels from leaf to leaf
COLUMNS = (12, 236, 338)  # where questions of each depth begin
LEAVES = 690
WIDTHS = (176, 66, 154)


def leaves(node: "Question | Leaf") -> int:
    """The number of leaves below."""
    return 1 if isinstance(node, Leaf) else sum(leaves(below) for _, below in node.answers)


def draw(picture: Picture, node: Question, depth: int, top: float) -> float:
    """Draw a question and all below it, whose first leaf is at `top`; return the middle of the question's box."""
    left, width, y, ends = COLUMNS[depth], WIDTHS[depth], top, []
    for answer, below in node.answers:
        if isinstance(below, Leaf):
            middle = y + STEP / 2
            picture.box(
                LEAVES, y + 3, 248, STEP - 8, (below.method, below.remark), fill=below.fill, size=11, mono=1, bold=1
            )
            ends.append((answer, LEAVES, middle))
        else:
            middle = draw(picture, below, depth + 1, y)
            ends.append((answer, COLUMNS[depth + 1], middle))
        y += STEP * leaves(below)
    middle = (ends[0][2] + ends[-1][2]) / 2
    height = 14 + 16.2 * len(node.lines)
    picture.box(left, middle - height / 2, width, height, node.lines, fill=GREY, stroke=LINE)
    bend = left + width + 16
    for answer, x, y in ends:
        picture.arrow([(left + width, middle), (bend, middle), (bend, y), (x - 2, y)])
        if answer:
            picture.text(bend + 6, y - 5, answer, size=11, fill=FAINT)
    return middle


def tree() -> str:
    """The whole tree."""
    count = leaves(TREE)
    about = (
        "A decision tree. Short inputs, biases, dense masks and outputs that must not change: full with subquad's "
        "kernel. A pretrained encoder: clustered-tail, i-clustered or tilted-pool. A pretrained decoder: "
        "clustered-tail, learned-feature-map or local. A model that you train: clustered-tail, linformer, longformer "
        "or bigbird, linear, rfa or performer, mixed-heads, or strided."
    )
    picture = Picture(950, 20 + STEP * count + 28, "Which method to use", about)
    draw(picture, TREE, 0, 10)
    note = "The crossover on your machine: subquad doctor --measure. Then measure in your model: subquad compare."
    picture.text(12, 16 + STEP * count + 18, note, fill=FAINT)
    return picture.svg()


# path below docs/assets/pictures -> what draws it
FILES = {"choose.svg": tree}
