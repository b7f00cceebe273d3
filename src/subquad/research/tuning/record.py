"""The report of a search as plain data: its trials, the best first, and the command that trains the best one."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from datetime import UTC, datetime

from subquad.research.tuning.run import Tuning
from subquad.research.tuning.schema import TriedTrial, TuneReport
from subquad.research.tuning.search import METHOD, read_searches
from subquad.tools.runs.machine import hardware, versions

ORDER = ("finished", "pruned", "failed")


def record_of(asked: Tuning, rows: Sequence[TriedTrial], words: Sequence[str], executor: str = "") -> TuneReport:
    """All data of a search. `words` are the command line of what is trained if nothing is searched."""
    searched = read_searches(asked.searches, asked.base)
    task = asked.base.at({one.name: one.ends[0] for one in searched}).task
    sign = -1 if task.greater_is_better else 1
    ordered = sorted(rows, key=lambda row: (ORDER.index(row.state), sign * (row.value or 0), row.number))
    searches = [word for text in asked.searches for word in ("--search", text)]
    options = ["--trials", str(asked.trials), *(["--prune"] if asked.prune else [])]
    options += ["--seed", str(asked.seed)] if asked.seed else []
    best = ordered[0]
    return TuneReport(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=shlex.join(["subquad", "tune", *words, *searches, *options]),
        task={"name": task.name, "summary": task.title, "metric": task.metric, "greater": task.greater_is_better},
        search={one.name: _scale(one.log, bool(one.choices)) for one in searched},
        trials=ordered,
        best={
            "number": best.number,
            "command": shlex.join(["subquad", "train", *_without_method(words, best), *_set(asked, best)]),
        },
        machine={**hardware(asked.device), **versions(), **({"executor": executor} if executor else {})},
    )


def _scale(log: bool, choices: bool) -> str:
    return "choices" if choices else "log" if log else "linear"


def _set(asked: Tuning, row: TriedTrial) -> list[str]:
    """The options that give the values of a trial."""
    words = [word for name, text in row.values.items() if name.partition(".")[0] != METHOD for word in _one(name, text)]
    if any(name.partition(".")[0] == METHOD for name in row.values):
        words += ["--method", asked.base.method_at(row.values)]
    return words


def _without_method(words: Sequence[str], row: TriedTrial) -> list[str]:
    """The words of a command without --method, where the values of a trial name one."""
    at = words.index("--method") if "--method" in words else len(words)
    searched = any(name.partition(".")[0] == METHOD for name in row.values)
    return [*words[:at], *words[at + 2 :]] if searched else list(words)


def _one(name: str, text: str) -> tuple[str, str]:
    return "--set", f"{name}={text}"
