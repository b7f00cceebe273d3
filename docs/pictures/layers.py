"""The layers of the package, and which of them imports which, read from the sources."""

import ast
from functools import cache
from pathlib import Path

from pictures.svg import BLUE, FAINT, GREY, LINE, PALE_BLUE, PALE_GREEN, PALE_ORANGE, Picture

SOURCE = Path(__file__).parents[2] / "src" / "subquad"
LAYERS = {  # from the top down; tests/test_layers.py checks that imports run downward
    "research": "what reproduces the papers and trains",
    "tools": "the commands: compare, plan, calibrate, bench, inspect, …",
    "testing": "the conformance tests, for methods of other packages too",
    "audits": "errors while a model runs",
    "hf": "swap and restore in Hugging Face models, longer positions",
    "nn": "MultiheadAttention, layers for sets, swap, intercept",
    "attention": "sq.attention, the one call",
    "distributed": "any method on several ranks",
    "methods": "one file per method",
    "kernels": "the mathematics that methods share: PyTorch, C++, Triton",
    "masks": "Mask, and reading the masks of SDPA and torch",
    "core": "errors, files, checksums, randomness, shapes",
}
PARTS = {"research": PALE_ORANGE, "tools": PALE_GREEN}  # all others are the library


@cache
def imports() -> dict[str, set[str]]:
    """The layers that each layer imports, anywhere in its files."""
    found: dict[str, set[str]] = {name: set() for name in LAYERS}
    for path in sorted(SOURCE.rglob("*.py")):
        layer = path.relative_to(SOURCE).with_suffix("").parts[0]
        if layer not in LAYERS:
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            parts = [name.split(".") for name in names if name.startswith("subquad.")]
            found[layer] |= {each[1] for each in parts if each[1] in LAYERS and each[1] != layer}
    return found


def layers() -> str:
    """A stack of layers with a square for each import."""
    step, left, top = 34, 20, 92
    names, across = list(LAYERS), 540
    about = (
        "The layers of the package, from the research at the top over the tools to the library, with a mark for each "
        f"layer that another imports. No layer imports one above it. From the top down: {', '.join(names)}."
    )
    picture = Picture(across + 26 * len(names) + 20, top + step * len(names) + 36, "The layers of the package", about)
    picture.text(left, top - 14, "layer", size=11, fill=FAINT)
    picture.text(across - 6, top - 14, "imports →", size=11, fill=FAINT, anchor="end")
    for i, name in enumerate(names):
        y, x = top + step * i, across + 26 * i
        picture.rect(left, y + 2, 500, step - 4, PARTS.get(name, PALE_BLUE), LINE, radius=4)
        picture.text(left + 10, y + 21, name, bold=True, mono=True)
        picture.text(left + 104, y + 21, LAYERS[name], size=11)
        head = f'<text transform="translate({x + 16} {top - 8}) rotate(-60)" font-size="11">{name}</text>'
        picture.add(head)
        for j, other in enumerate(names):
            mark = other in imports()[name]
            if j >= i + 1 or mark:
                picture.rect(across + 26 * j + 2, y + 6, 22, 22, BLUE if mark else GREY, radius=3)
    y = top + step * len(names) + 24
    for x, fill, text in ((20, PALE_ORANGE, "research"), (120, PALE_GREEN, "tools"), (200, PALE_BLUE, "the library")):
        picture.rect(x, y - 10, 12, 12, fill, LINE)
        picture.text(x + 18, y, text, size=11)
    picture.rect(across + 2, y - 10, 12, 12, BLUE)
    picture.text(across + 20, y, "the row imports the column", size=11)
    return picture.svg()


# path below docs/assets/pictures -> what draws it
FILES = {"layers.svg": layers}
