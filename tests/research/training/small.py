"""Runs of a second: masked copy of a few symbols by a model of a few units."""

from collections.abc import Callable
from pathlib import Path

import torch

from subquad.research.papers import catalogue as _with_their_tasks  # noqa: F401
from subquad.research.training.run import Outcome, train
from subquad.research.training.settings import RunSettings, read_overrides, settings_of

SIZES = ("task.length=7", "model.layers=1", "model.heads=2", "model.width=16", "model.feed_forward=32")
TRAINING = ("training.steps=24", "training.batch=8", "training.every=8", "training.learning_rate=0.003")
QUICK = ("training.evaluation_batch=256", "task.examples=2000")


def small(*overrides: str) -> RunSettings:
    return settings_of("masked-copy", read_overrides([*SIZES, *TRAINING, *QUICK, *overrides]))


class Killed(BaseException):
    """An end as sudden as a signal that no handler sees: what is on the disk stays, all else is lost."""


def killed_at(step: int) -> Callable[[str, int, int], None]:
    def progress(what: str, done: int, total: int) -> None:
        if done == step:
            raise Killed

    return progress


def interrupted(settings: RunSettings, out: Path, *steps: int) -> Outcome:
    """Killed after each of these steps, then gone on with to the end."""
    for step in steps:
        try:
            train(settings, out, progress=killed_at(step))
        except Killed:
            continue
        raise AssertionError(f"step {step} was never reached")
    return train(settings, out)


def assert_same_weights(a: torch.nn.Module, b: torch.nn.Module) -> None:
    first, second = a.state_dict(), b.state_dict()
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


def without_times(history: list[dict]) -> list[dict]:
    """The log less what differs from run to run."""
    times = ("seconds", "runtime", "per_second", "preparation_time")
    return [{k: v for k, v in entry.items() if not k.endswith(times)} for entry in history]
