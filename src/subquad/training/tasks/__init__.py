"""Tasks by name: data, model, metric, baselines."""

from subquad.training.tasks.base import Splits, Task
from subquad.training.tasks.masked_copy import MaskedCopy

TASKS: dict[str, type[Task]] = {task.name: task for task in (MaskedCopy,)}

__all__ = ["TASKS", "Splits", "Task"]
