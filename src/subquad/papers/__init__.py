"""What reproduces the papers: their experiments by name, and the tasks and data that only they need."""

from importlib import import_module
from typing import cast

from subquad.errors import InputError
from subquad.papers import tasks as _registered  # noqa: F401
from subquad.papers.base import Experiment
from subquad.spelling import instead

MODULES = (  # in the order of the papers
    "copy_heatmap",
    "approximation_matrix",
    "speed_accuracy",
    "convergence",
    "pretrained_approximation",
    "time_memory",
    "attention_utility",
    "bucket_imbalance",
    "lha_latency",
    "training_dynamics",
    "lm_ablation",
    "lra",
    "forecast",
    "linformer_quality",
    "linformer_efficiency",
    "spectrum",
    "performer_approximation",
    "set_clustering",
)

NAMES = tuple(module.replace("_", "-") for module in MODULES)


def load(name: str) -> Experiment:
    """An experiment by name. InputError names the nearest one that there is."""
    if name not in NAMES:
        raise InputError(f"no experiment {name!r}{instead(name, NAMES, '`subquad reproduce` lists')}")
    return cast(Experiment, import_module(f"subquad.papers.experiments.{name.replace('-', '_')}").EXPERIMENT)
