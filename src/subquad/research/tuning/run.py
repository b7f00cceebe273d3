"""The whole of `subquad tune`: trials on an executor until there are enough, in a folder that holds one search."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from subquad.core.errors import InputError
from subquad.core.messages import note
from subquad.research.training.settings import RunSettings
from subquad.research.training.tasks import TASKS
from subquad.research.tuning.schema import PLOT, TriedTrial, plot_by
from subquad.research.tuning.search import Base, Searched, Value, all_points, read_searches
from subquad.research.tuning.study import FILE, Study
from subquad.research.tuning.study_trial import Trial, Tried
from subquad.tools.cli.folder import RunFolder, device_and_data
from subquad.tools.runs.cache import JobCache, stray_in
from subquad.tools.runs.executors import LOCAL, Executor
from subquad.tools.runs.jobs import Job, JobProgress, Progress, silent

CLAIM = "search.json"
TRIALS = "trials"
HOPELESS = 3  # trials of which all have failed end the search
MOST = 100_000


@dataclass(frozen=True)
class Tuning:
    """The settings of a search: what is searched, how often, and where."""

    base: Base
    searches: tuple[str, ...]
    out: Path
    trials: int = 20
    prune: bool = False
    seed: int = 0
    data: Path | None = None
    device: str = "cpu"


def tune(
    asked: Tuning, progress: Progress = silent, executor: Executor = LOCAL, again: bool = False
) -> list[TriedTrial]:
    """Run trials until the folder contains as many as requested; all of them, in their order.

    With `again`, a finished search in the folder is removed first.

    Raises:
        InputError: the search is invalid, the folder contains another one, or all trials failed.
    """
    searched = check(asked, executor)
    search_folder(asked).begin(again)
    return _Search(asked, searched, progress).run(executor)


def check(asked: Tuning, executor: Executor = LOCAL) -> list[Searched]:
    """Return the settings that are searched, or raise InputError for what is wrong with the search."""
    if not 1 <= asked.trials <= MOST:
        raise InputError(f"trials {asked.trials} must be at least 1 and at most {MOST:,}")
    if not 0 <= asked.seed < 2**32:
        raise InputError(f"seed {asked.seed} must be at least 0 and less than 2³²")
    executor.check_device(asked.device)
    if asked.data is not None and not asked.data.is_dir():
        raise InputError(f"no data folder at {asked.data}")
    searched = read_searches(asked.searches, asked.base)
    training = asked.base.at({one.name: one.ends[0] for one in searched}).training
    if asked.prune and not 0 < training.every < training.steps:
        raise InputError(
            f"--prune looks at validations on the way, but training.every={training.every} with training.steps="
            f"{training.steps} has none: give --set training.every=N"
        )
    return searched


def search_folder(asked: Tuning) -> RunFolder:
    """The folder of a search, which is finished with the number of trials asked for; more may be added."""
    points = all_points(read_searches(asked.searches, asked.base), asked.trials)
    trials = asked.trials if points is None else len(points)
    search = {
        "task": asked.base.task,
        "settings": asked.base.fixed,
        "search": asked.searches,
        "prune": asked.prune,
        "seed": asked.seed,
        **device_and_data(asked.device, asked.data if TASKS[asked.base.task].needs else None),
    }
    return RunFolder(
        asked.out,
        "subquad tune",
        search,
        CLAIM,
        rf"{TRIALS}|{re.escape(FILE)}(\.lock.*)?|results\.md",
        recorded=lambda content: [f"{file}.png" for file in (PLOT, *map(plot_by, content["search"]))],
        stray=lambda: stray_in(asked.out / TRIALS, "trial"),
        is_complete=lambda content: len(content["trials"]) >= trials,
    )


class _Search:
    """A search that is under way."""

    def __init__(self, asked: Tuning, searched: list[Searched], progress: Progress):
        self.asked, self.searched, self.progress = asked, searched, progress
        self.out = asked.out.absolute()
        self.task = asked.base.at({one.name: one.ends[0] for one in searched}).task
        self.study = Study(self.out, self.task.greater_is_better, asked.prune)
        self.cache = JobCache(
            self.out / TRIALS, key_field="trial", file_name=str, remedy="; the same command runs the trial again"
        )
        self.values: dict[int, dict[str, Value]] = {}
        self.rows: dict[int, TriedTrial] = {}

    def run(self, executor: Executor) -> list[TriedTrial]:
        """Run what is left to run."""
        begun = self.study.open(self.searched)
        self._read_ended()
        wanted = self._wanted(begun)
        reports = JobProgress(self.progress, wanted, len(self.rows))
        if len(self.rows) < wanted:
            for job, _ in executor.run(self._jobs(begun, wanted), reports):
                self._take(int(job.key.removeprefix("trial ")))
                reports.done += 1
        self.progress("done", wanted, wanted)
        if not any(row.state == "finished" for row in self.rows.values()):
            self._check_hope(list(self.rows.values()), least=1)
        return [self.rows[number] for number in sorted(self.rows)]

    def _read_ended(self) -> None:
        """Trials that ended in earlier runs; those whose end the study was not told are told now."""
        for trial in self.study.trials():
            if self.cache.has(str(trial.number)):
                self.values[trial.number] = {one.name: trial.params[one.name] for one in self.searched}
                self._take(trial.number, recorded=trial.state.is_finished())

    def _wanted(self, begun: Mapping[int, dict[str, Value]]) -> int:
        """The number of trials to run in all; few points are tried once each."""
        points = all_points(self.searched, self.asked.trials)
        if points is None:
            return max(self.asked.trials, len(self.rows))
        if len(points) < self.asked.trials:
            note(self.progress, f"the search has {len(points)} points, each of which is tried once")
        return len(self.rows.keys() | begun.keys()) + self.study.plan(points, self.searched)

    def _jobs(self, begun: Mapping[int, dict[str, Value]], wanted: int) -> Iterator[Job[Any]]:
        """Trials that were begun, then new ones: each is asked for when there is room to run it."""
        started = len(self.rows)
        for number, values in begun.items():
            if number not in self.rows:
                started += 1
                yield self._job(number, values)
        while started < wanted:
            started += 1
            yield self._job(*self.study.ask(self.searched, self.asked.seed))

    def _job(self, number: int, values: dict[str, Value]) -> Job[Any]:
        self.values[number] = values
        texts = self._texts(number)
        settings: RunSettings | str
        try:
            settings = self.asked.base.at(texts)
        except InputError as error:  # the ends of all ranges are valid, but not every value between them
            settings = str(error)
        trial = Trial(
            number=number,
            settings=settings,
            folder=self.cache.folder / f"{number}",
            study=self.out,
            data=None if self.asked.data is None else self.asked.data.absolute(),
            device=self.asked.device,
            prune=self.asked.prune,
        )
        key = f"trial {number}"
        label = f"{key}: {', '.join(f'{name}={text}' for name, text in texts.items())}"
        return Job(key, partial(self.cache.compute, Job(str(number), trial.run, record=Tried)), label=label)

    def _texts(self, number: int) -> dict[str, str]:
        """The values of a trial as `--set` reads them."""
        return {one.name: one.shown(self.values[number][one.name]) for one in self.searched}

    def _take(self, number: int, recorded: bool = False) -> None:
        """Take note of a trial that ended, whose result is kept: its checkpoints are not needed any more."""
        tried = self.cache.read(str(number), Tried).result
        self.rows[number] = TriedTrial(number, self._texts(number), **vars(tried))
        if not recorded:
            self.study.tell(number, tried.state, tried.value)
        shutil.rmtree(self.cache.folder / f"{number}", ignore_errors=True)
        if tried.state == "failed" and not recorded:
            note(self.progress, f"trial {number} failed: {tried.reason}")
            self._check_hope(list(self.rows.values()), least=HOPELESS)

    @staticmethod
    def _check_hope(rows: list[TriedTrial], least: int) -> None:
        """InputError where at least `least` trials have ended, and all of them failed."""
        if len(rows) >= least and all(row.state == "failed" for row in rows):
            raise InputError(f"all {len(rows)} trials failed, the last one because {rows[-1].reason}")
