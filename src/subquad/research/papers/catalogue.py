"""The experiments by name."""

from importlib import import_module
from typing import cast

from subquad.core.errors import InputError
from subquad.core.spelling import instead
from subquad.research.papers.base import Experiment

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
    return cast(Experiment, import_module(f"subquad.research.papers.experiments.{name.replace('-', '_')}").EXPERIMENT)
