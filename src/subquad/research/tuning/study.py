"""Optuna's study: which settings are tried next, which trials end early; kept in a file of the folder."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import optuna
from optuna.pruners import BasePruner, MedianPruner, NopPruner
from optuna.samplers import TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from subquad.core import checksums as seals
from subquad.research.tuning.search import Searched, Value

FILE = "trials.log"  # of Optuna's journal: several processes on several machines may add to it
NAME = "subquad"
STARTUP = 4  # trials that run to their end before any is pruned
STATES = {"finished": TrialState.COMPLETE, "pruned": TrialState.PRUNED, "failed": TrialState.FAIL}


class Study:
    """The study in a folder, made if need be.

    Every process that asks or tells has an object of its own; the file is what they share.

    Raises:
        Damaged: the file cannot be read.
    """

    def __init__(self, folder: Path, greater_is_better: bool, prune: bool):
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            pruner: BasePruner = MedianPruner(n_startup_trials=STARTUP) if prune else NopPruner()
            direction = StudyDirection.MAXIMIZE if greater_is_better else StudyDirection.MINIMIZE
            self._study = _opened(folder / FILE, pruner, direction)

    def ask(self, searched: Sequence[Searched], seed: int) -> tuple[int, dict[str, Value]]:
        """The number and the values of a new trial.

        A new sampler is made for every trial, from the seed and the number of trials before: a search that was
        interrupted then asks for the same values as one that was not.
        """
        index = sum(_is_whole(trial, searched) for trial in self.trials())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            self._study.sampler = TPESampler(seed=(seed * 1_000_003 + index) % 2**32, constant_liar=True)
        trial = self._study.ask()
        for one in searched:
            one.suggested(trial)
        return trial.number, dict(trial.params)

    def plan(self, points: Sequence[Mapping[str, Value]], searched: Sequence[Searched]) -> int:
        """Have these points asked for next, without those that were asked for already; how many are to be asked for."""
        trials = self.trials()
        known = [trial.params for trial in trials if _is_whole(trial, searched)]
        known += [trial.system_attrs["fixed_params"] for trial in trials if trial.state == TrialState.WAITING]
        for point in points:
            if point not in known:
                self._study.enqueue_trial(dict(point))
        return sum(trial.state == TrialState.WAITING for trial in self.trials())

    def tell(self, number: int, state: str, value: float | None) -> None:
        """Take note of how a trial ended."""
        self._study.tell(number, value if state == "finished" else None, STATES[state])

    def is_pruned(self, number: int, step: int, value: float) -> bool:
        """Record a value on the way, and return whether the trial ends there."""
        trial = self.trials()[number]
        self._study._storage.set_trial_intermediate_value(trial._trial_id, step, value)
        return bool(self._study.pruner.prune(self._study, self.trials()[number]))

    def trials(self) -> list[FrozenTrial]:
        """All trials, by their numbers."""
        return self._study.get_trials(deepcopy=False)

    def open(self, searched: Sequence[Searched]) -> dict[int, dict[str, Value]]:
        """The values of trials that were begun and not told, by number; one without all of its values fails."""
        recorded = {}
        for trial in self.trials():
            if trial.state != TrialState.RUNNING:
                continue
            if _is_whole(trial, searched):
                recorded[trial.number] = dict(trial.params)
            else:
                self.tell(trial.number, "failed", None)
        return recorded


def _opened(path: Path, pruner: BasePruner, direction: StudyDirection) -> optuna.Study:
    """The study in a file; Damaged where Optuna cannot read it, for which it has no error of its own."""
    try:
        storage = JournalStorage(JournalFileBackend(str(path)))
        return optuna.create_study(
            storage=storage, pruner=pruner, study_name=NAME, direction=direction, load_if_exists=True
        )
    except OSError:
        raise
    except Exception as error:
        reason = f"Optuna cannot read it ({type(error).__name__})"
        raise seals.Damaged(path, reason, "give another folder with --out") from error


def _is_whole(trial: FrozenTrial, searched: Sequence[Searched]) -> bool:
    """Tell whether a trial has all of its values: a process that is killed while it asks leaves one without."""
    return set(trial.params) == {one.name for one in searched}
