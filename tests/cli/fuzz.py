"""Commands with odd arguments, models, tables and settings, each from a number: what a user may give and what nobody would.

`command_of(number, place)` writes what the command reads into the folder `place` and returns its words.
"""

import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from subquad.experiments import NAMES, load
from subquad.methods import METHODS
from subquad.training.settings import ModelSettings, TrainingSettings
from subquad.training.tasks import TASKS
from tests.workflows import tiny

WORDS = [
    "", " ", ".", "/", "-1", "0", "1", "2", "7", "32", "33", "64", "65", "1.5", "1e3", "nan", "inf", "-inf", "1_0", "٣", "+2", "0x10",
    "9" * 20, "-" + "9" * 20, "9" * 5000, "1" * 300, "x" * 300, "a/b", "a/b/c", "../x", "~", "a b", "a,b", "a\nb", "a\tb", "\x1b[31m", "\x07",
    "[/bold]", r"\[x]", "[red]", ":smile:", "$x$", "{buckets}", "{}", "%s", "ü", "🙂", "\u2028", "\u202e", "a\u0301", "\ud800", "a\0b",
    "None", "true", "null", "[]", "['a']", "{a = 1}", "[" * 2000, "cpu", "cuda", "cuda:99", "meta", "mps", "tpu", "cpu:7", "float32", "float128",
    "forward", "full", "local:window=4", "lha-tail", "/dev/zero", "/dev/null", "/dev/stdin", "/proc/self/mem", "/etc", "text", "label",
]  # fmt: skip
NUMBERS = [
    "-1",
    "0",
    "1",
    "2",
    "3",
    "5",
    "16",
    "17",
    "31",
    "32",
    "63",
    "64",
    "65",
    "512",
    "1000000000",
    "9" * 25,
    "nan",
    "inf",
    "1e-300",
    ".5",
]
VALUES = [None, True, False, 0, -1, 1, 3, 7, 10**9, 10**30, 0.5, -1.5, 1e300, float("nan"), float("inf"), "", "x", "gelu", "[MASK]", [], [5], {}, {"a": 1}, [[[]]], "\ud800"]  # fmt: skip


def command_of(number: int, place: Path, models: Callable[[str], str]) -> list[str]:
    """The words of a command, and all that it reads in the folder."""
    draw = random.Random(number)
    make = FAMILIES[number % len(FAMILIES)]
    return [*make(draw, place, models), *([] if make is about else ["--out", str(place / "out")])]


# ---------------------------------------------------------------------- what is read


def model_folder(draw: random.Random, place: Path, models: Callable[[str], str]) -> list[str]:
    """A model whose files are damaged."""
    name = draw.choice(["bert", "bert", "masked", "gpt2", "modernbert"])
    folder = place / draw.choice(["model", "a [b] :x:", r"a\[b", "ü"])
    shutil.copytree(models(name), folder)
    pooling = folder / "1_Pooling"
    pooling.mkdir()
    (pooling / "config.json").write_text(
        json.dumps({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True})
    )
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for _ in range(draw.choice([1, 1, 1, 2])):
        damage(draw, draw.choice([*files, *[folder / "config.json"] * 3, folder / "model.safetensors"]))
    return [*reading(draw, str(folder)), "--text", str(text_of(place))]


def table(draw: random.Random, place: Path, models: Callable[[str], str]) -> list[str]:
    """Text in odd files."""
    path = place / (
        draw.choice(["a", "a [b]", "ü", r"\[a"]) + draw.choice([".txt", ".csv", ".tsv", ".jsonl", ".md", ".png"])
    )
    content = odd_rows(draw, path.suffix)
    path.write_bytes(content)
    if draw.random() < 0.3:
        damage(draw, path)
    text = place if draw.random() < 0.2 and path.suffix != ".png" else path
    column = ["--column", draw.choice(["text", "label", "b", "", *WORDS])] if draw.random() < 0.2 else []
    return [*reading(draw, models(draw.choice(["bert", "gpt2"]))), "--text", str(text), *column]


def task(draw: random.Random, place: Path, models: Callable[[str], str]) -> list[str]:
    """A labelled task whose data is odd."""
    name, files = draw.choice([
        ("banking77", ["train.csv", "test.csv"]),
        ("labelled", ["train.csv", "test.csv"]),
        ("sts", ["sts.tsv"]),
        ("retrieval", ["retrieval.jsonl"]),
        ("movie-reviews", ["movie_reviews.zip"]),
    ])  # fmt: skip
    data = place / "data"
    data.mkdir()
    for file in files:
        (data / file).write_bytes(odd_rows(draw, Path(file).suffix, name))
        if draw.random() < 0.3:
            damage(draw, data / file)
    examples = ["--examples", draw.choice(NUMBERS)] if draw.random() < 0.3 else []
    model = models(draw.choice(["bert", "bert", "gpt2"]))
    return [
        "compare",
        model,
        "--text",
        str(text_of(place)),
        "--task",
        name,
        "--data-dir",
        str(data),
        *examples,
        *few(draw),
    ]


def text_of(place: Path) -> Path:
    """A text that is as it should be."""
    path = place / "text.txt"
    path.write_text("\n\n".join(tiny.documents(4, 12)))
    return path


def odd_rows(draw: random.Random, suffix: str, name: str = "") -> bytes:
    """Some content that suits a file's kind, more or less."""
    cells = [
        *tiny.documents(4, 6),
        "a",
        "b",
        "\u2028 x",
        "x\x85y\x0cz",
        '"',
        "'",
        "a,b",
        "a\tb",
        "$x_1$",
        "\x00",
        "🙂" * 50,
        "word " * 30_000,
    ]
    pick = lambda: draw.choice(cells[:6] if draw.random() < 0.8 else cells)  # noqa: E731
    head = {"banking77": ["text", "category"], "labelled": ["text", "label"], "retrieval": ["question", "passage"]}.get(
        name, ["text", "label"]
    )
    rows = [[pick(), draw.choice(["x", "y", "1", "2.5", "nan", ""])] for _ in range(draw.choice([0, 1, 2, 6, 12, 40]))]
    if name == "sts":
        return "".join(
            f"{pick()}\t{pick()}\t{draw.choice(['1', '2', 'nan', 'inf', 'x'] if draw.random() < 0.2 else ['1', '2', '3'])}\n"
            for _ in rows
        ).encode()
    if name == "retrieval":
        rows = [[pick(), pick()] for _ in rows]
    if suffix == ".jsonl":
        lines = [json.dumps(dict(zip(head, row, strict=True)), ensure_ascii=draw.random() < 0.5) for row in rows]
        if draw.random() < 0.3:
            lines.append(json.dumps({head[0]: draw.choice(VALUES)}))
        return "\n".join(lines).encode(errors="replace")
    if suffix in (".csv", ".tsv"):
        between = "," if suffix == ".csv" else "\t"
        quoted = lambda cell: f'"{cell}"' if draw.random() < 0.7 else cell  # noqa: E731
        lines = [between.join(head), *(between.join(quoted(cell) for cell in row) for row in rows)]
        return draw.choice(["\n", "\r\n", "\r"]).join(lines).encode()
    return "\n".join(pick() for _ in rows).encode()


def damage(draw: random.Random, path: Path) -> None:
    """Change a file: its bytes, what its JSON says, or what it is."""
    if not path.is_file() or path.is_symlink() or path.stat().st_size > 2**30:
        return
    content = path.read_bytes()
    kind = draw.choice(["json", "json", "json", "flip", "cut", "empty", "what", "encoding", "deep", "other"])
    if kind == "json" and path.suffix == ".json":
        try:
            path.write_text(json.dumps(changed(draw, json.loads(content))), errors="replace")
        except ValueError:  # it was damaged before
            path.write_text("{")
    elif kind == "flip":
        changes = bytearray(content or b"x")
        for _ in range(draw.choice([1, 4, 40])):
            changes[draw.randrange(min(len(changes), draw.choice([40, 4000, 10**9])))] = draw.randrange(256)
        path.write_bytes(bytes(changes))
    elif kind == "cut":
        path.write_bytes(content[: draw.randrange(len(content) + 1)])
    elif kind == "empty":
        path.write_bytes(draw.choice([b"", b"\n", b"\xef\xbb\xbf", b"null", b"[]", b"5", b'"x"', b"{}"]))
    elif kind == "encoding":
        path.write_bytes(content.decode(errors="replace").encode(draw.choice(["utf-16", "utf-32", "utf-8-sig"])))
    elif kind == "deep":
        path.write_bytes(draw.choice([b"[" * 100_000, b'{"a":' * 100_000, b"[" * 100_000 + b"]" * 100_000]))
    else:
        path.unlink()
        odd = draw.choice(["nothing", "pipe", "link", "loop", "folder", "zero", "sparse"])
        if odd == "pipe":
            os.mkfifo(path)
        elif odd in ("link", "loop", "zero"):
            path.symlink_to({"link": path.parent / "missing", "loop": path, "zero": "/dev/zero"}[odd])
        elif odd == "folder":
            path.mkdir()
        elif odd == "sparse":
            with path.open("wb") as file:
                file.truncate(2**40)


def changed(draw: random.Random, data: object) -> object:
    """JSON in which one thing is another, or gone."""
    if isinstance(data, dict) and data and draw.random() < 0.9:
        name = draw.choice(list(data))
        if draw.random() < 0.15:
            return {key: value for key, value in data.items() if key != name}
        return {**data, name: changed(draw, data[name])}
    if isinstance(data, list) and data and draw.random() < 0.8:
        at = draw.randrange(len(data))
        return [*data[:at], changed(draw, data[at]), *data[at + 1 :]]
    return draw.choice(VALUES)


# ---------------------------------------------------------------------- arguments


def reading(draw: random.Random, model: str) -> list[str]:
    """A command that reads a model."""
    return draw.choice([
        ["compare", model, *few(draw)],
        ["inspect", model, "--length", "24", "--sequences", "1", "--tokens", "8", *few(draw)],
        ["calibrate", model, "--method", "lha:buckets=2", "--steps", "1"],
    ])  # fmt: skip


def few(draw: random.Random) -> list[str]:
    """One method, of the quick ones."""
    return ["--methods", draw.choice(["local:window=4", "i-clustered:clusters=4", "lsh:buckets=4", "performer"])]


def method_text(draw: random.Random) -> str:
    """A method as the command line writes it, with a mistake or without."""
    name = draw.choice([*METHODS, "mixed-heads", "none"])
    settings = list(METHODS[name]().to_dict())[1:] if name in METHODS and name != "mixed-heads" else ["methods"]
    given = [
        f"{draw.choice([*settings, 'none'])}{draw.choice(['=', '=', '=', '', '=='])}{draw.choice([*NUMBERS, *WORDS])}"
        for _ in range(draw.choice([0, 1, 1, 2]))
    ]
    text = name + draw.choice([":", ":", ":", "", "::", " "]) + ",".join(given)
    if name == "mixed-heads":
        parts = [
            draw.choice(
                [
                    "local",
                    "lha",
                    "3*local:window=4",
                    "local:window=4;",
                    "0*full",
                    "9*lha:buckets=2",
                    "mixed-heads:methods=local+lha",
                    "x*local",
                    "",
                ]
            )
            for _ in range(draw.choice([1, 2, 3, 200]))
        ]
        text = "mixed-heads:methods=" + "+".join(parts)
    return text[: draw.randrange(len(text) + 1)] if draw.random() < 0.1 else text


OPTIONS = {
    "compare": ["--text", "--column", "--task", "--data-dir", "--examples", "--methods", "--adapter", "--calibrate", "--max-length", "--min-fidelity", "--device"],
    "inspect": ["--text", "--column", "--methods", "--adapter", "--buckets", "--length", "--sequences", "--layer", "--head", "--tokens", "--device"],
    "calibrate": ["--method", "--text", "--column", "--steps", "--max-length", "--batch", "--seed", "--device"],
    "bench": ["--methods", "--lengths", "--passes", "--dtypes", "--device", "--batch", "--heads", "--head-dim", "--threads", "--seed", "--call-limit", "--compare"],
}  # fmt: skip
COUNTS = {"--examples", "--max-length", "--buckets", "--length", "--sequences", "--layer", "--head", "--tokens", "--steps", "--batch", "--seed", "--lengths", "--heads", "--head-dim", "--threads", "--min-fidelity", "--call-limit"}  # fmt: skip


def arguments(draw: random.Random, place: Path, models: Callable[[str], str]) -> list[str]:
    """A command with odd values of its options."""
    command = draw.choice(list(OPTIONS))
    model = models(draw.choice(["bert", "gpt2", "masked"])) if draw.random() < 0.85 else draw.choice(WORDS)
    if command == "bench":
        given = {
            "--lengths": "16,32",
            "--methods": "local:window=4",
            "--heads": "2",
            "--head-dim": "8",
            "--passes": "forward",
        }
        words = [command, "--quick", *(["--causal"] if draw.random() < 0.2 else [])]
    else:
        given = {"--text": str(text_of(place)), "--methods": "local:window=4"}
        given |= {"--length": "24", "--sequences": "1", "--tokens": "8"} if command == "inspect" else {}
        words = [command, "--", model] if model.startswith("-") else [command, model]
    if command == "calibrate":
        given = {"--text": given["--text"], "--method": "lha:buckets=2", "--steps": "1"}
    for option in draw.sample(OPTIONS[command], draw.choice([1, 1, 2])):
        if option in ("--methods", "--method") and draw.random() < 0.7:
            given[option] = method_text(draw)
        else:
            given[option] = draw.choice(NUMBERS if option in COUNTS and draw.random() < 0.7 else WORDS)
    return [words[0], *(f"{option}={value}" for option, value in given.items()), *words[1:]]


def methods(draw: random.Random, place: Path, models: Callable[[str], str]) -> list[str]:
    """Texts of methods, in the cheapest command that runs them."""
    return ["bench", "--quick", "--lengths=16", "--heads=4", "--head-dim=8", f"--methods={method_text(draw)}"]


SMALL = {
    "model.layers": "1",
    "model.heads": "2",
    "model.width": "8",
    "training.steps": "2",
    "training.batch": "2",
    "training.warmup": "0",
}
LISTS = {"task.shortest": "4", "task.longest": "12", "task.depth": "3", "task.examples": "16", "task.held_out": "8"}
WORK = {
    "visits",
    "steps",
    "fit_steps",
    "moves",
    "draws",
    "samples",
    "workers",
    "seconds",
    "epochs",
    "layers",
    "sequences",
}
SHORT = ["spectrum", "performer-approximation", "bucket-imbalance", "attention-utility", "lha-latency", "copy-heatmap"]


def training(draw: random.Random, place: Path, models: Callable[[str], str]) -> list[str]:
    """`train` with odd settings, in --set or in a file."""
    name = draw.choice(["listops", "lm", "text"])
    tables = {"task": TASKS[name](), "model": ModelSettings(), "training": TrainingSettings()}
    known = {f"{table}.{key}": value for table, of in tables.items() for key, value in asdict(of).items()}
    given = SMALL | (LISTS if name == "listops" else {})
    if name != "listops":
        path = place / ("a.txt" if name == "lm" else "a.csv")
        path.write_bytes(odd_rows(draw, path.suffix, "labelled"))
        given |= {"task.files": json.dumps([str(path)]), "task.length": "16", "task.held_out": "0.3"}
    for key in draw.sample([*known, "model.x", "x.y"], draw.choice([1, 1, 2])):
        given[key] = method_text(draw) if key == "model.method" else odd_value(draw, known.get(key), key)
    if draw.random() < 0.2:
        file = place / "settings.toml"
        tables = [
            f"[{t}]\n" + "\n".join(f"{k[len(t) + 1 :]} = {v}" for k, v in given.items() if k.startswith(t + "."))
            for t in tables
        ]
        file.write_text("\n".join(tables), errors="replace")
        if draw.random() < 0.5:
            damage(draw, file)
        return ["train", name, f"--config={file}"]
    return ["train", name, *(f"--set={key}={value}" for key, value in given.items())]


def experiment(draw: random.Random, place: Path, models: Callable[[str], str]) -> list[str]:
    """`reproduce` with odd settings, of the experiments whose smoke runs are short."""
    name = draw.choice(SHORT) if draw.random() < 0.95 else draw.choice(WORDS)
    if name not in NAMES:
        return ["reproduce", "--scale=smoke", "--set=x=1", f"--device={draw.choice(WORDS)}", "--", name]
    known = asdict(load(name).scales["smoke"])
    given = {key: odd_value(draw, known.get(key), key) for key in draw.sample([*known, "x"], draw.choice([1, 1, 2]))}
    scale = "smoke" if draw.random() < 0.95 else draw.choice(["", "smok", "[x]"])
    return ["reproduce", name, f"--scale={scale}", *(f"--set={key}={value}" for key, value in given.items())]


def odd_value(draw: random.Random, default: object, name: str = "") -> str:
    """A value of a setting, mostly of its kind, as TOML writes it; no more work than fits into a test."""
    if name.rpartition(".")[2] in WORK:
        return draw.choice(["-1", "0", "1", "2", "nan", "x"])
    if draw.random() < 0.15:
        return draw.choice(WORDS)
    if isinstance(default, list | tuple):
        inner = default[0] if default else "x"
        return f"[{', '.join(odd_value(draw, inner) for _ in range(draw.choice([0, 1, 1, 2])))}]"
    if isinstance(default, dict):
        return f"{{{', '.join(f'{key} = {odd_value(draw, value)}' for key, value in default.items())}}}"
    if isinstance(default, bool):
        return draw.choice(["true", "false", "1"])
    if isinstance(default, int | float):
        return draw.choice([*NUMBERS, str(default)])
    return json.dumps(draw.choice(WORDS)) if draw.random() < 0.7 else draw.choice(WORDS)


def about(draw: random.Random, place: Path, models: Callable[[str], str]) -> list[str]:
    """`methods NAME`."""
    text = draw.choice([method_text(draw), draw.choice(WORDS)])
    return ["methods", *draw.choice([[], ["--json"]]), "--", text]


FAMILIES = [model_folder, table, arguments, model_folder, task, methods, training, arguments, experiment, about]
