"""Tasks by name: data, model, metric, baselines."""

from subquad.research.training.tasks.fine_tuned_text import FineTunedText
from subquad.research.training.tasks.lm import Lm
from subquad.research.training.tasks.task import Splits, Task
from subquad.research.training.tasks.text_classification import Text

# Other packages add their own: `subquad.research.papers.tasks` does.
TASKS: dict[str, type[Task]] = {task.name: task for task in (Lm, Text)}

# Those that a pretrained model can be fine-tuned on, and what they are then.
FINE_TUNED: dict[str, type[Task]] = {FineTunedText.name: FineTunedText}

__all__ = ["FINE_TUNED", "TASKS", "Splits", "Task"]
