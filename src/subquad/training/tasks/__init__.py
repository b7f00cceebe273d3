"""Tasks by name: data, model, metric, baselines."""

from subquad.training.tasks.base import Splits, Task
from subquad.training.tasks.forecast import Forecast
from subquad.training.tasks.genome import NextBase
from subquad.training.tasks.lm import Lm
from subquad.training.tasks.masked_copy import MaskedCopy
from subquad.training.tasks.speech import Speech
from subquad.training.tasks.text import Text

TASKS: dict[str, type[Task]] = {task.name: task for task in (MaskedCopy, Lm, NextBase, Speech, Text, Forecast)}

__all__ = ["TASKS", "Splits", "Task"]
