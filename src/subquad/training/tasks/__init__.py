"""Tasks by name: data, model, metric, baselines."""

from subquad.training.tasks.base import Splits, Task
from subquad.training.tasks.forecast import Forecast
from subquad.training.tasks.genome import NextBase
from subquad.training.tasks.image import Image
from subquad.training.tasks.listops import ListOps
from subquad.training.tasks.lm import Lm
from subquad.training.tasks.masked_copy import MaskedCopy
from subquad.training.tasks.match import Match
from subquad.training.tasks.speech import Speech
from subquad.training.tasks.text import Text

TASKS: dict[str, type[Task]] = {
    task.name: task for task in (MaskedCopy, Lm, NextBase, Speech, ListOps, Text, Image, Match, Forecast)
}

__all__ = ["TASKS", "Splits", "Task"]
