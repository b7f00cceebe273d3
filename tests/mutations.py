"""Damage files that are read again, thousands of times: each time it is refused in one line, or changes nothing.

    python -m tests.mutations --count 1000 --seed 0

Of every file: so many flipped bits, so many truncations, so many deleted bytes (or one of each place, where it has
fewer). Of every file of JSON also edits that leave it valid: a member that is gone, another number or text, another
method. What reads it is what the commands read it with.
"""

import argparse
import json
import os
import random
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers

import subquad as sq
from subquad.core import checksums as seals
from subquad.core.environment import hardware, versions
from subquad.core.errors import InputError
from subquad.hf.plans import joined
from subquad.methods.core.measured_crossovers import MeasuredCrossover, machine, read_all
from subquad.methods.core.measured_crossovers import store as store_crossovers
from subquad.research.papers.run import cells_in
from subquad.research.training import checkpoints, same_data
from subquad.research.training.run import train
from subquad.tools.calibrate import run as calibrate
from subquad.tools.runs.cache import run_cache
from subquad.tools.runs.jobs import Job
from tests.research.training.small import Killed, killed_at, small
from tests.tools.workflows import tiny

NOTICED = {"refused", "warned", "the same"}
KINDS = ("bit flips", "truncations", "byte deletions")
EDITS = "edits"  # of JSON
OTHERS = tuple(cls().to_dict() for cls in (sq.Full, sq.Local, sq.Clustered))  # methods to put in another's place


@dataclass(frozen=True)
class Target:
    """A file, and what reads it: everything that a run takes from it, to be compared."""

    path: Path
    read: Callable[[], Any]
    member: str | None = None  # of a JSON file that others wrote: the only part that is subquad's, and is edited

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of damage."""
        if self.member is not None:
            return (EDITS,)
        return (*KINDS, EDITS) if self.path.suffix == ".json" else KINDS


def adapter(at: Path) -> Iterator[Target]:
    torch.manual_seed(0)
    sizes = {"vocab_size": 60, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
    model = transformers.BertModel(transformers.BertConfig(**sizes, num_hidden_layers=2, max_position_embeddings=64))
    sq.hf.swap(model, "lha:buckets=3,hidden=8")
    record = {"steps": 40, "history": [{"step": 0, "layers": {"0": {"utility": 0.25}}}], "ended": "all steps done"}
    sq.hf.save_adapter(model, at, record=record, card="# card")

    def read() -> Any:
        found = sq.hf.read_adapter(at)
        return found.methods, found.model, found.record, found.tensors

    yield Target(at / "adapter.json", read)
    yield Target(at / "adapter.safetensors", read)


def calibration(at: Path) -> Iterator[Target]:
    """The checkpoint that an interrupted calibration resumes from."""
    text = at / "text.txt"
    tiny.save("bert", at / "bert")
    text.write_text("\n".join(tiny.documents()))
    settings = calibrate.CalibrateSettings("lha:buckets=3,hidden=8", (text,), str(at / "bert"), steps=60, max_length=48)
    trainers: list[Any] = []

    class Remembered(calibrate.Trainer):
        def run(self, checkpoint: Path, progress: Any) -> None:
            trainers.append((self, checkpoint))
            super().run(checkpoint, progress)

    original, calibrate.Trainer = calibrate.Trainer, Remembered  # type: ignore[misc]
    try:
        calibrate.calibrate(settings, at / "out", killed_at(55))
    except Killed:
        pass
    finally:
        calibrate.Trainer = original  # type: ignore[misc]
    trainer, checkpoint = trainers[0]

    def read() -> Any:
        trainer._restore(checkpoint)
        state = {name: getattr(trainer, name) for name in ("step", "stale", "ended", "history", "best", "seconds")}
        return state, [b.state_dict() for b in trainer.bounds.values()], trainer.optimizer.state_dict()

    yield Target(checkpoint, read)


def training(at: Path) -> Iterator[Target]:
    """All files of the checkpoint that an interrupted training resumes from, and what it knows of its data."""
    with suppress(Killed):
        train(small(), at, progress=killed_at(17))
    checkpoint = checkpoints.checkpoint_at(at, 16)
    sealed = sorted(path for path in checkpoint.iterdir() if path.is_file() and path.name != checkpoints.CHECKSUMS)

    def read() -> Any:
        found = checkpoints.newest(at)
        return found, [path.read_bytes() for path in sealed]

    for path in (*sealed, checkpoint / checkpoints.CHECKSUMS):
        yield Target(path, read)
    yield Target(at / same_data.DATA, lambda: same_data._read(at / same_data.DATA))


def store(at: Path) -> Iterator[Target]:
    """A unit of compare, inspect or bench."""
    kept = run_cache(at, {"model": "tiny", "seed": 0})
    result = {"full": {"seconds": 0.125, "output": [0.5, -1.25, 3e-9]}, "lha": {"extra_mib": None, "output": [1, 2]}}
    kept.get(Job("stretch/96/0", lambda progress: result))
    yield Target(next(kept.folder.glob("*.json")), lambda: kept.get(Job("stretch/96/0", _not_again)))


def _not_again(progress: Any) -> Any:
    raise AssertionError("the unit was there, and is measured again")


def cell(at: Path) -> Iterator[Target]:
    """A cell of reproduce, and the tensors that it left for others."""
    cache = cells_in(at)
    result = {"accuracy": 0.8125, "losses": [[10, 2.5], [20, 1.25]]}
    cache.get(Job("full seed=0", lambda progress: result))
    yield Target(next(cache.folder.glob("*.json")), lambda: cache.get(Job("full seed=0", lambda progress: {})))
    seals.save(at / "vectors.pt", {"train": torch.randn(20, 8), "test": torch.randn(5, 8)})
    yield Target(at / "vectors.pt", lambda: seals.load(at / "vectors.pt", "remove it"))


def plan(at: Path) -> Iterator[Target]:
    """A plan that learned parameters travel with."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 60, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
    model = transformers.BertModel(transformers.BertConfig(**sizes, num_hidden_layers=2, max_position_embeddings=64))
    layers = sq.hf.find_layers(model)
    steps = {0: sq.Full(), 9: sq.hf.bind(layers[0], "lha:buckets=3,hidden=8"), 40: sq.Local(window=7)}
    method, bound = joined(layers[0], steps)
    assert bound is not None
    found = {"floor": 0.9, "fidelity": 0.95, "bound": 0.93, "confidence": 0.95, "passages": 8, "speedup": 1.4}
    made_on = {"command": "subquad plan", "versions": versions(), "hardware": hardware(), "text": {"tokens": 4000}}
    methods = {0: method, 1: sq.Local(window=4)}
    sq.Plan(sq.hf.adapters.describe_model(model), (20, 40), methods, {"20": found}, made_on, {0: bound}).save(at, model)

    def read() -> Any:
        found = sq.load_plan(at)
        facts = [found.lengths, found.layers, found.model, found.verified, found.made_on]
        if found.adapter is None:  # no method with learned parameters is left
            return facts
        return facts, found.adapter.methods, found.adapter.model, found.adapter.tensors

    for name in ("plan.json", "adapter.json", "adapter.safetensors"):
        yield Target(at / name, read)


def swapped(at: Path) -> Iterator[Target]:
    """The config of a model that was saved while swapped."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 60, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
    model = transformers.BertModel(transformers.BertConfig(**sizes, num_hidden_layers=4, max_position_embeddings=64))
    by_length = sq.ByLength({0: "full", 20: "i-clustered:clusters=4"})
    sq.hf.swap(model, {0: "local:window=4", 1: by_length, 2: "performer:features=16", 3: "clustered"}, keep="first")
    model.save_pretrained(at)

    def read() -> Any:
        loaded = transformers.BertModel.from_pretrained(at)
        if not sq.hf.bounds(loaded):
            try:
                sq.hf.reattach(loaded)
            except ValueError as error:
                raise InputError(f"{at}: {error}") from None
        described = sq.hf.describe(loaded)
        return described.methods, described.keep

    yield Target(at / "config.json", read, "subquad")


def crossovers(at: Path) -> Iterator[Target]:
    """The measured crossovers of this machine."""
    measured = MeasuredCrossover(machine(), "clustered", "float32", 12, 64, False, "at", 811.5, 128, 2048)
    with patch.dict(os.environ, SUBQUAD_CACHE=str(at)):
        yield Target(store_crossovers([measured]), lambda: [asdict(each) for each in read_all()])


SETS = {
    "adapter": adapter,
    "swapped": swapped,
    "plan": plan,
    "calibrate": calibration,
    "train": training,
    "compare": store,
    "reproduce": cell,
    "doctor": crossovers,
}


def damaged(data: bytes, kind: str, draw: random.Random) -> bytes:
    """The file's bytes with one mutation of a kind."""
    place = draw.randrange(len(data))
    if kind == "bit flips":
        return data[:place] + bytes([data[place] ^ (1 << draw.randrange(8))]) + data[place + 1 :]
    return data[:place] if kind == "truncations" else data[:place] + data[place + 1 :]


def edited(data: bytes, member: str | None, draw: random.Random) -> bytes:
    """A file of JSON with one part removed, or changed to another of its kind."""
    whole = json.loads(data)
    places = list(_places(whole if member is None else whole[member]))
    holder, key = draw.choice(places)
    value = holder[key]
    if draw.random() < 0.3:
        del holder[key]
    elif isinstance(value, dict) and "name" in value:
        holder[key] = draw.choice([each for each in OTHERS if each["name"] != value["name"]])
    else:
        holder[key] = _another(value, draw)
    return json.dumps(whole).encode()


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every part of plain data, as what holds it and its key or number there."""
    for key in tree if isinstance(tree, dict) else range(len(tree)):
        yield tree, key
        if isinstance(tree[key], dict | list):
            yield from _places(tree[key])


def _another(value: Any, draw: random.Random) -> Any:
    """Another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + draw.choice([-1, 1, 7])
    if isinstance(value, str):
        return draw.choice([value + "x", "full", "local", "first", "ends"])
    return [*value, 1] if isinstance(value, list) else {**(value or {}), "more": 1}


def outcome(target: Target, wanted: Any) -> str:
    """The outcome of a damaged file: refused in one line, the same after all, silently another, or a traceback.

    Warned of: it is read, and is said to have been edited.
    """
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = target.read()
    except InputError as error:
        return "refused" if "\n" not in str(error) and str(target.path.parent) in str(error) else f"unclear: {error}"
    except ValueError as error:  # of `sq.hf`, which the commands turn into an InputError
        return "refused" if "\n" not in str(error) and str(target.path) in str(error) else f"unclear: {error!r}"
    except Exception as error:
        return f"traceback: {type(error).__name__}"
    if same(found, wanted):
        return "the same"
    return "warned" if any(f"{target.path} was edited" in str(warning.message) for warning in said) else "SILENT"


def same(a: Any, b: Any) -> bool:
    """Equal bit for bit, types and tensors too."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def campaign(name: str, at: Path, count: int, seed: int = 0) -> dict[tuple[str, str], Counter[str]]:
    """{(file, kind): how often each outcome}."""
    found: dict[tuple[str, str], Counter[str]] = {}
    at.mkdir(parents=True, exist_ok=True)
    for target in SETS[name](at):
        whole, wanted = target.path.read_bytes(), copied(target.read())
        for kind in target.kinds:
            draw, tally = random.Random(f"{seed} {target.path.name} {kind}"), Counter[str]()
            for _ in range(count):
                change = edited(whole, target.member, draw) if kind == EDITS else damaged(whole, kind, draw)
                target.path.write_bytes(change)
                tally[outcome(target, wanted)] += 1
            found[target.path.name, kind] = tally
        target.path.write_bytes(whole)
        assert same(target.read(), wanted)
    return found


def copied(value: Any) -> Any:
    """So that what reads it again does not change it."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    return type(value)(map(copied, value)) if isinstance(value, list | tuple) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000, help="of each kind, of each file")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    totals: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="subquad-mutations-") as folder:
        for name in SETS:
            for (file, kind), tally in campaign(name, Path(folder) / name, given.count, given.seed).items():
                print(f"{name:<10} {file:<24} {kind:<15} {dict(tally)}", flush=True)
                totals.update(tally)
    print(f"{sum(totals.values()):,} mutations: {dict(totals)}")
    raise SystemExit(0 if set(totals) <= NOTICED else 1)


if __name__ == "__main__":
    main()
