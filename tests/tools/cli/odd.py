"""Odd words, numbers, texts and files."""

import json
import os
import random
from pathlib import Path

from subquad.methods import METHODS
from tests.tools.workflows import tiny

# fmt: off
WORDS = [
    "", " ", ".", "/", "-1", "0", "1", "2", "7", "32", "33", "64", "65", "1.5", "1e3", "nan", "inf", "-inf", "1_0", "٣",
    "+2", "0x10", "9" * 20, "-" + "9" * 20, "9" * 5000, "1" * 300, "x" * 300, "a/b", "a/b/c", "../x", "~", "a b", "a,b",
    "a\nb", "a\tb", "\x1b[31m", "\x07", "[/bold]", r"\[x]", "[red]", ":smile:", "$x$", "{buckets}", "{}", "%s", "ü",
    "🙂", "\u2028", "\u202e", "a\u0301", "\ud800", "a\0b", "None", "true", "null", "[]", "['a']", "{a = 1}", "[" * 2000,
    "cpu", "cuda", "cuda:99", "meta", "mps", "tpu", "cpu:7", "float32", "float128", "forward", "full", "local:window=4",
    "lha-tail", "/dev/zero", "/dev/null", "/dev/stdin", "/proc/self/mem", "/etc", "text", "label",
]
NUMBERS = [
    "-1", "0", "1", "2", "3", "5", "16", "17", "31", "32", "63", "64", "65", "512", "1000000000", "9" * 25, "nan",
    "inf", "1e-300", ".5",
]
VALUES = [
    None, True, False, 0, -1, 1, 3, 7, 10**9, 10**30, 0.5, -1.5, 1e300, float("nan"), float("inf"), "", "x", "gelu",
    "[MASK]", "\ud800", [], [5], {}, {"a": 1}, [[[]]],
]
CELLS = [
    *tiny.documents(4, 6), "a", "b", "\u2028 x", "x\x85y\x0cz", '"', "'", "a,b", "a\tb", "$x_1$", "\x00", "🙂" * 50,
    "word " * 30_000,
]
PARTS = [
    "local", "lha", "3*local:window=4", "local:window=4;", "0*full", "9*lha:buckets=2", "mixed-heads:methods=local+lha",
    "x*local", "",
]
# Counts of repeated work: more of it takes longer, as it should.
WORK = {
    "visits", "steps", "fit_steps", "moves", "draws", "samples", "workers", "seconds", "epochs", "layers", "sequences",
}
# fmt: on
COLUMNS = {"banking77": ["text", "category"], "retrieval": ["question", "passage"]}


def method_text(draw: random.Random) -> str:
    """A method as the command line writes it, with a mistake or without."""
    name = draw.choice([*METHODS, "mixed-heads", "none"])
    if name == "mixed-heads":
        text = f"{name}:methods=" + "+".join(draw.choices(PARTS, k=draw.choice([1, 2, 3, 200])))
    else:
        known = [*(key for key in METHODS[name]().to_dict() if key != "name")] if name in METHODS else []
        settings = [
            draw.choice([*known, "none"]) + draw.choice(["=", "=", "=", "", "=="]) + draw.choice([*NUMBERS, *WORDS])
            for _ in range(draw.choice([0, 1, 1, 2]))
        ]
        text = name + draw.choice([":", ":", ":", "", "::", " "]) + ",".join(settings)
    return text[: draw.randrange(len(text) + 1)] if draw.random() < 0.1 else text


def setting(draw: random.Random, default: object, name: str = "") -> str:
    """A value of a setting, mostly of its kind, as TOML writes it; no more work than fits into a test."""
    if name.rpartition(".")[2] in WORK:
        return draw.choice(["-1", "1", "2", "nan", "x"])
    if draw.random() < 0.15:
        return draw.choice(WORDS)
    if isinstance(default, list | tuple):
        inner = default[0] if default else "x"
        return f"[{', '.join(setting(draw, inner) for _ in range(draw.choice([0, 1, 1, 2])))}]"
    if isinstance(default, dict):
        return f"{{{', '.join(f'{key} = {setting(draw, value, key)}' for key, value in default.items())}}}"
    if isinstance(default, bool):
        return draw.choice(["true", "false", "1"])
    if isinstance(default, int | float):
        return draw.choice([*NUMBERS, str(default)])
    return json.dumps(draw.choice(WORDS)) if draw.random() < 0.7 else draw.choice(WORDS)


def rows(draw: random.Random, suffix: str, name: str = "") -> bytes:
    """Some content that suits a file's kind, and a task of this name, more or less."""

    def cell() -> str:
        return draw.choice(CELLS[:6] if draw.random() < 0.8 else CELLS)

    def label() -> str:
        return draw.choice(["x", "y", "1", "2.5", "nan", ""] if draw.random() < 0.3 else ["1", "2", "3"])

    count, head = draw.choice([0, 1, 2, 6, 12, 40]), COLUMNS.get(name, ["text", "label"])
    found = [[cell(), cell() if name == "retrieval" else label()] for _ in range(count)]
    if name == "sts":
        return "".join(f"{cell()}\t{text}\t{score}\n" for text, score in found).encode()
    if suffix == ".jsonl":
        lines = [json.dumps(dict(zip(head, row, strict=True)), ensure_ascii=draw.random() < 0.5) for row in found]
        lines += [json.dumps({head[0]: draw.choice(VALUES)})] if draw.random() < 0.3 else []
        return "\n".join(lines).encode(errors="replace")
    if suffix in (".csv", ".tsv"):
        quoted = [[f'"{text}"' if draw.random() < 0.7 else text for text in row] for row in found]
        lines = [("," if suffix == ".csv" else "\t").join(row) for row in [head, *quoted]]
        return draw.choice(["\n", "\r\n", "\r"]).join(lines).encode()
    return "\n".join(cell() for _ in found).encode()


def damage(draw: random.Random, path: Path) -> None:
    """Change a file: its bytes, what its JSON says, or what it is."""
    if not path.is_file() or path.is_symlink() or path.stat().st_size > 2**30:
        return
    kind = draw.choice(["json", "json", "json", "flip", "cut", "empty", "encoding", "deep", "other"])
    if kind == "other":
        _replace(draw, path)
    else:
        path.write_bytes(_damaged(draw, path.read_bytes(), kind))


def _damaged(draw: random.Random, content: bytes, kind: str) -> bytes:
    if kind == "json":
        try:
            return json.dumps(_changed(draw, json.loads(content))).encode(errors="replace")
        except (ValueError, RecursionError):  # none, or damaged before
            return b"{"
    if kind == "flip":
        changes = bytearray(content or b"x")
        for _ in range(draw.choice([1, 4, 40])):
            changes[draw.randrange(min(len(changes), draw.choice([40, 4000, 10**9])))] = draw.randrange(256)
        return bytes(changes)
    if kind == "cut":
        return content[: draw.randrange(len(content) + 1)]
    if kind == "empty":
        return draw.choice([b"", b"\n", b"\xef\xbb\xbf", b"null", b"[]", b"5", b'"x"', b"{}"])
    if kind == "encoding":
        return content.decode(errors="replace").encode(draw.choice(["utf-16", "utf-32", "utf-8-sig"]))
    return draw.choice([b"[" * 100_000, b'{"a":' * 100_000, b"[" * 100_000 + b"]" * 100_000])


def _replace(draw: random.Random, path: Path) -> None:
    """Something else in a file's place."""
    path.unlink()
    other = draw.choice(["nothing", "pipe", "link", "loop", "folder", "zero", "sparse"])
    if other == "pipe":
        os.mkfifo(path)
    elif other in ("link", "loop", "zero"):
        path.symlink_to({"link": path.parent / "missing", "loop": path, "zero": "/dev/zero"}[other])
    elif other == "folder":
        path.mkdir()
    elif other == "sparse":
        with path.open("wb") as file:
            file.truncate(2**40)


def _changed(draw: random.Random, data: object) -> object:
    """JSON in which one thing is another, or gone."""
    if isinstance(data, dict) and data and draw.random() < 0.9:
        name = draw.choice(list(data))
        if draw.random() < 0.15:
            return {key: value for key, value in data.items() if key != name}
        return {**data, name: _changed(draw, data[name])}
    if isinstance(data, list) and data and draw.random() < 0.8:
        at = draw.randrange(len(data))
        return [*data[:at], _changed(draw, data[at]), *data[at + 1 :]]
    return draw.choice(VALUES)
