"""Kill runs at random, go on with them, and see that they end as if nothing had happened.

    python -m tests.tools.workflows.kills --kills 50 --seed 0 [--command train]

Half of the kills come at a random time, the other half in the middle of a write: before the n-th time that the process
has something on the disk, renames or removes something. Each run is killed one to three times, started again each time,
and then let go on to its end; what it ends with is compared with an uninterrupted run, times left out.
"""

import argparse
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import subquad as sq
from subquad.core.files import PART  # noqa: F401
from subquad.research.papers import run as _imported_before_forking  # noqa: F401
from subquad.research.training import run as _this_too  # noqa: F401
from subquad.tools.calibrate import run as calibrate
from subquad.tools.cli.main import app
from subquad.tools.compare import run as compare
from subquad.tools.plan import loads
from tests.research.training.small import QUICK, SIZES, TRAINING
from tests.tools.workflows import tiny
from tests.tools.workflows.planning.steady import make_steady

CHANGES = ("fsync", "replace", "unlink", "rmdir", "mkdir")  # of os: what changes the disk
TIMES = ("seconds", "runtime", "per_second", "preparation_time", "created")


def plain(data: Any) -> Any:
    """Without times, and without where it was written."""
    if isinstance(data, dict):
        return {k: plain(v) for k, v in data.items() if not k.endswith(TIMES) and k not in ("source", "model")}
    return [plain(item) for item in data] if isinstance(data, list) else data


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def of_compare(out: Path) -> Any:
    kept = ("method", "settings", "status", "layers", "fidelity", "quality")
    return [{name: row.get(name) for name in kept} for row in read(out / "report.json")["methods"]]


def of_plan(out: Path) -> Any:
    plan = sq.load_plan(out)
    assert plan.adapter is not None
    tensors = {n: {name: tensor.tolist() for name, tensor in of.items()} for n, of in plan.adapter.tensors.items()}
    return [plan.layers, plan.verified, tensors, plain(read(out / "report.json")["lengths"])]


def of_calibrate(out: Path) -> Any:
    return [(out / "adapter.safetensors").read_bytes(), plain(read(out / "adapter.json")["record"])]


def of_train(out: Path) -> Any:
    kept = ("test", "validation", "steps", "best_step", "history")
    results = read(out / "results.json")
    return [(out / "model" / "model.safetensors").read_bytes(), plain({name: results[name] for name in kept})]


def of_reproduce(out: Path) -> Any:
    return plain(read(out / "results.json")["cells"])


@dataclass(frozen=True)
class Command:
    """A command to run, and how to compare its output files."""

    words: Callable[[Path, Path], list[str]]  # of the folders of the inputs and of the run
    results: Callable[[Path], Any]


def _options(name: str, values: tuple[str, ...]) -> list[str]:
    return [word for value in values for word in (name, value)]


COMMANDS = {
    "compare": Command(
        lambda at, out: [
            *("compare", str(at / "bert"), "--text", str(at / "text"), "--out", str(out)),
            *("--dtype", "fp32", "--layers"),
            *("--methods", "clustered:clusters=4 local:window=8", "--methods", "lha:buckets=3,hidden=8"),
            *("--calibrate", str(at / "other")),
        ],
        of_compare,
    ),
    "plan": Command(
        lambda at, out: [
            *(
                "plan",
                str(at / "bert"),
                "--text",
                str(at / "text"),
                "--calibrate",
                str(at / "other"),
                "--lengths",
                "64",
            ),
            *("--methods", "local:window=12 lha:buckets=3,hidden=8", "--min-fidelity", "0.1", "--out", str(out)),
        ],
        of_plan,
    ),
    "calibrate": Command(
        lambda at, out: [
            *("calibrate", str(at / "bert"), "--text", str(at / "text"), "--max-length", "48", "--out", str(out)),
            *("--method", "lha:buckets=3,hidden=16", "--steps", "40"),
        ],
        of_calibrate,
    ),
    "train": Command(
        lambda at, out: [
            *("train", "masked-copy", "--method", "lha:buckets=2", "--out", str(out)),
            *_options("--set", (*SIZES, *TRAINING, *QUICK, "model.dropout=0.1")),
        ],
        of_train,
    ),
    "reproduce": Command(
        lambda at, out: ["reproduce", "linformer-quality", "--scale", "smoke", "--out", str(out)],
        of_reproduce,
    ),
}


def prepare(at: Path) -> None:
    """Make the inputs, and the commands small."""
    tiny.save("bert", at / "bert")
    for name, documents in (("text", tiny.documents()), ("other", [text[::-1] for text in tiny.documents()])):
        (at / name).mkdir()
        for i, document in enumerate(documents):
            (at / name / f"{i}.txt").write_text(document)
    calibrate.EVERY, calibrate.PATIENCE, calibrate.GAIN = 10, 3, 10.0  # 30 steps
    make, small = compare.prepare, {"lengths": (96,), "op_lengths": (32,), "passages": 6}
    compare.prepare = lambda settings, *rest: make(replace(settings, **small), *rest)
    loads.MOST, loads.HELD_OUT = 3, 4
    make_steady(setattr)


def started(words: list[str], log: Path, *, dies_at: int = 0, counts: Path | None = None, room: int = 0) -> int:
    """A process of its own that runs a command; the imports are done. Its number.

    It kills itself before the `dies_at`-th change of the disk, or says in the file `counts` how many there were. No
    file may become larger than `room` bytes, which to what writes it is the same as a full disk.
    """
    number = os.fork()
    if number:
        return number
    code = 1
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        if room:
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
        seen = _counting(dies_at)
        try:
            app(words)
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
        if counts:
            counts.write_text(str(len(seen)))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _counting(dies_at: int) -> list[str]:
    seen: list[str] = []

    def counted(name: str) -> Callable[..., Any]:
        change = getattr(os, name)

        def call(*given: Any, **more: Any) -> Any:
            seen.append(name)
            if len(seen) == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return change(*given, **more)

        return call

    for name in CHANGES:
        setattr(os, name, counted(name))
    return seen


@dataclass
class Tally:
    """The counts of outcomes."""

    kills: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COMMANDS, 0))
    in_writes: int = 0
    runs: int = 0
    differ: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        each = ", ".join(f"{name} {count}" for name, count in self.kills.items() if count)
        return (
            f"{sum(self.kills.values())} kills ({each}; {self.in_writes} of them in writes) in {self.runs} runs, "
            f"{len(self.differ)} of which ended otherwise than an uninterrupted one"
        )


def campaign(name: str, kills: int, seed: int, at: Path, tally: Tally) -> None:
    """Kill one command so many times in all."""
    command, draw = COMMANDS[name], random.Random(f"{name} {seed}")
    whole, counts = at / f"{name}-whole", at / f"{name}-changes"
    begun = time.perf_counter()
    code = ended(started(command.words(at, whole), at / f"{name}-whole.log", counts=counts))
    assert code == 0, (at / f"{name}-whole.log").read_text()
    seconds, changes, wanted = time.perf_counter() - begun, int(counts.read_text()), command.results(whole)
    print(f"{name}: uninterrupted {seconds:.1f} s, {changes} changes of the disk", flush=True)
    while tally.kills[name] < kills:
        tally.runs += 1
        out, log = at / f"{name}-{tally.runs}", at / f"{name}-{tally.runs}.log"
        how = []
        for _ in range(min(draw.randint(1, 3), kills - tally.kills[name])):
            in_write = draw.random() < 0.5
            place, moment = draw.randint(1, changes), draw.uniform(0.02, 0.98) * seconds
            process = started(command.words(at, out), log, dies_at=place if in_write else 0)
            if not in_write:
                time.sleep(moment)
                os.kill(process, signal.SIGKILL)  # it is not waited for yet, so that the number is still its own
            if ended(process) == -signal.SIGKILL:
                tally.kills[name] += 1
                tally.in_writes += in_write
                how.append(f"change {place}" if in_write else f"{moment:.2f} s")
        code = ended(started(command.words(at, out), log))
        if code != 0 or command.results(out) != wanted:
            tally.differ.append(f"{name}, killed at {', '.join(how)}: exit code {code}, see {log}")
            print(tally.differ[-1], flush=True)
        else:
            shutil.rmtree(out)


def ended(process: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="of each command's share: in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--command", choices=COMMANDS, action="append")
    given = parser.parse_args()
    names, tally = given.command or list(COMMANDS), Tally()
    at = Path(tempfile.mkdtemp(prefix="subquad-kills-"))
    prepare(at)
    for i, name in enumerate(names):
        campaign(name, given.kills // len(names) + (i < given.kills % len(names)), given.seed, at, tally)
        print(tally, flush=True)
    if tally.differ:
        raise SystemExit(1)
    shutil.rmtree(at)


if __name__ == "__main__":
    main()
