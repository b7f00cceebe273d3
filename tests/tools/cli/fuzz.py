"""Commands with odd arguments, models, tables and settings, each from a number: what nobody would give, and users do.

`command_of(number, place, models)` writes what the command reads into the folder `place` and returns its words.
"""

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from subquad.research.papers.catalogue import NAMES, load
from subquad.research.training.settings import ModelSettings, TrainingSettings
from subquad.research.training.tasks import TASKS
from tests.tools.cli.odd import NUMBERS, WORDS, damage, method_text, rows, setting
from tests.tools.workflows import tiny

Models = Callable[[str], str]  # the folder of a tiny model, by its name

# fmt: off
OPTIONS = {
    "compare": ["text", "column", "task", "data-dir", "examples", "methods", "adapter", "calibrate", "max-length",
                "min-fidelity", "device"],
    "inspect": ["text", "column", "methods", "adapter", "buckets", "length", "sequences", "layer", "head", "tokens",
                "device"],
    "calibrate": ["method", "text", "column", "steps", "max-length", "batch", "seed", "device"],
    "bench": ["methods", "lengths", "passes", "dtypes", "device", "batch", "heads", "head-dim", "threads", "seed",
              "call-limit", "compare"],
}
COUNTS = {"examples", "max-length", "min-fidelity", "buckets", "length", "sequences", "layer", "head", "tokens",
          "steps", "batch", "seed", "lengths", "heads", "head-dim", "threads", "call-limit"}
FILES = {"banking77": ["train.csv", "test.csv"], "labelled": ["train.csv", "test.csv"], "sts": ["sts.tsv"],
         "retrieval": ["retrieval.jsonl"], "movie-reviews": ["movie_reviews.zip"]}
SMALL = {"model.layers": "1", "model.heads": "2", "model.width": "8", "training.steps": "2", "training.batch": "2",
         "training.warmup": "0"}
LISTS = {"task.shortest": "4", "task.longest": "12", "task.depth": "3", "task.examples": "16", "task.held_out": "8"}
# fmt: on
SHORT = ["spectrum", "performer-approximation", "bucket-imbalance", "attention-utility", "lha-latency"]


def command_of(number: int, place: Path, models: Models) -> list[str]:
    """The words of a command, and all that it reads in the folder."""
    draw, make = random.Random(number), FAMILIES[number % len(FAMILIES)]
    return [*make(draw, place, models), *([] if make is about else ["--out", str(place / "out")])]


def model_folder(draw: random.Random, place: Path, models: Models) -> list[str]:
    """A model whose files are damaged."""
    folder = place / draw.choice(["model", "a [b] :x:", r"a\[b", "ü"])
    shutil.copytree(models(draw.choice(["bert", "bert", "masked", "gpt2", "modernbert"])), folder)
    pooling = folder / "1_Pooling" / "config.json"
    pooling.parent.mkdir()
    pooling.write_text(json.dumps({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}))
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for _ in range(draw.choice([1, 1, 1, 2])):
        damage(draw, draw.choice([*files, *[folder / "config.json"] * 3, folder / "model.safetensors"]))
    return [*_reading(draw, str(folder)), "--text", _text(place)]


def table(draw: random.Random, place: Path, models: Models) -> list[str]:
    """Text in odd files."""
    name = draw.choice(["a", "a [b]", "ü", r"\[a"]) + draw.choice([".txt", ".csv", ".tsv", ".jsonl", ".md", ".png"])
    path = place / name
    path.write_bytes(rows(draw, path.suffix))
    if draw.random() < 0.3:
        damage(draw, path)
    text = place if draw.random() < 0.2 else path
    column = ["--column", draw.choice(["label", *WORDS])] if draw.random() < 0.2 else []
    return [*_reading(draw, models(draw.choice(["bert", "gpt2"]))), "--text", str(text), *column]


def task(draw: random.Random, place: Path, models: Models) -> list[str]:
    """A labelled task whose data is odd."""
    name, data = draw.choice(list(FILES)), place / "data"
    data.mkdir()
    for file in FILES[name]:
        (data / file).write_bytes(rows(draw, Path(file).suffix, name))
        if draw.random() < 0.3:
            damage(draw, data / file)
    examples = ["--examples", draw.choice(NUMBERS)] if draw.random() < 0.3 else []
    words = ["compare", models(draw.choice(["bert", "bert", "bert", "gpt2"])), "--text", _text(place), *_few(draw)]
    return [*words, "--task", name, "--data-dir", str(data), *examples]


def arguments(draw: random.Random, place: Path, models: Models) -> list[str]:
    """A command with odd values of its options."""
    command = draw.choice(list(OPTIONS))
    model = models(draw.choice(["bert", "gpt2", "masked"])) if draw.random() < 0.85 else draw.choice(WORDS)
    if command == "bench":
        given = {"lengths": "16,32", "methods": "local:window=4", "heads": "2", "head-dim": "8", "passes": "forward"}
    elif command == "calibrate":
        given = {"text": _text(place), "method": "lha:buckets=2", "steps": "1"}
    else:
        given = {"text": _text(place), "methods": "local:window=4"}
    if command == "inspect":
        given |= {"length": "24", "sequences": "1", "tokens": "8"}
    for option in draw.sample(OPTIONS[command], draw.choice([1, 1, 2])):
        numbers = option in COUNTS and draw.random() < 0.7
        given[option] = draw.choice(NUMBERS if numbers else WORDS)
        if option in ("methods", "method") and draw.random() < 0.7:
            given[option] = method_text(draw)
    words = [command, *(f"--{option}={value}" for option, value in given.items())]
    return [*words, "--quick", *["--causal"] * draw.choice([0, 0, 1])] if command == "bench" else [*words, "--", model]


def methods(draw: random.Random, place: Path, models: Models) -> list[str]:
    """Texts of methods, in the cheapest command that runs them."""
    return ["bench", "--quick", "--lengths=16", "--heads=4", "--head-dim=8", f"--methods={method_text(draw)}"]


def training(draw: random.Random, place: Path, models: Models) -> list[str]:
    """`train` with odd settings, in --set or in a file."""
    name = draw.choice(["listops", "lm", "text"])
    tables = {"task": TASKS[name](), "model": ModelSettings(), "training": TrainingSettings()}
    known = {f"{table}.{key}": value for table, of in tables.items() for key, value in asdict(of).items()}
    given = SMALL | (LISTS if name == "listops" else {})
    if name != "listops":
        path = place / ("a.txt" if name == "lm" else "a.csv")
        path.write_bytes(rows(draw, path.suffix))
        given |= {"task.files": json.dumps([str(path)]), "task.length": "16", "task.held_out": "0.3"}
    given |= {"task.limit": "8"} if name == "lm" else {}
    for key in draw.sample([*known, "model.x", "x.y"], draw.choice([1, 1, 2])):
        given[key] = method_text(draw) if key == "model.method" else setting(draw, known.get(key), key)
    if draw.random() < 0.8:
        return ["train", name, *(f"--set={key}={value}" for key, value in given.items())]
    file, lines = place / "settings.toml", [f"{key} = {value}" for key, value in given.items()]
    file.write_text("\n".join(lines), errors="replace")
    if draw.random() < 0.5:
        damage(draw, file)
    return ["train", name, f"--config={file}"]


def experiment(draw: random.Random, place: Path, models: Models) -> list[str]:
    """`reproduce` with odd settings, of the experiments whose smoke runs are short."""
    name = draw.choice(SHORT) if draw.random() < 0.95 else draw.choice(WORDS)
    if name not in NAMES:
        return [
            "reproduce",
            "--scale=smoke",
            "--set=x=1",
            f"--device={draw.choice(WORDS)}",
            *([name] if not name.startswith("-") else []),
        ]
    known = asdict(load(name).scales["smoke"])
    given = {key: setting(draw, known.get(key), key) for key in draw.sample([*known, "x"], draw.choice([1, 1, 2]))}
    scale = "smoke" if draw.random() < 0.95 else draw.choice(["", "smok", "[x]"])
    return ["reproduce", name, f"--scale={scale}", *(f"--set={key}={value}" for key, value in given.items())]


def about(draw: random.Random, place: Path, models: Models) -> list[str]:
    """`methods NAME`."""
    return ["methods", *["--json"] * draw.choice([0, 1]), "--", draw.choice([method_text(draw), draw.choice(WORDS)])]


FAMILIES = [model_folder, table, arguments, model_folder, task, methods, training, arguments, experiment, about]


def _reading(draw: random.Random, model: str) -> list[str]:
    """A command that reads a model."""
    command = draw.choice(["compare", "inspect", "calibrate"])
    if command == "calibrate":
        return [command, model, "--method", "lha:buckets=2", "--steps", "1"]
    short = ["--length", "24", "--sequences", "1", "--tokens", "8"] if command == "inspect" else []
    return [command, model, *short, *_few(draw)]


def _few(draw: random.Random) -> list[str]:
    """One method, of the quick ones."""
    return ["--methods", draw.choice(["local:window=4", "i-clustered:clusters=4", "lsh:buckets=4", "performer"])]


def _text(place: Path) -> str:
    """A text that is as it should be."""
    path = place / "text.txt"
    path.write_text("\n\n".join(tiny.documents(4, 12)))
    return str(path)
