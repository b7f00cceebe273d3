"""Tasks by name: data, model, metric, baselines."""

from subquad.training.tasks.base import Splits, Task
from subquad.training.tasks.masked_copy import MaskedCopy
from subquad.training.tasks.text import Text

TASKS: dict[str, type[Task]] = {task.name: task for task in (MaskedCopy, Text)}

__all__ = ["TASKS", "Splits", "Task"]
