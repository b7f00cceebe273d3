"""Tasks by name: data, model, metric, baselines."""

from subquad.training.tasks.base import Splits, Task
from subquad.training.tasks.lm import Lm
from subquad.training.tasks.text import Text

# Other packages add their own: `subquad.papers.tasks` does.
TASKS: dict[str, type[Task]] = {task.name: task for task in (Lm, Text)}

__all__ = ["TASKS", "Splits", "Task"]
