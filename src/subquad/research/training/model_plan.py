"""The methods of a plan for a model that is trained: `model.plan` in a file of settings, `subquad train --plan`."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from subquad import hf
from subquad.core.errors import InputError, as_input_error
from subquad.hf.adapters import shape_of
from subquad.hf.plans import Plan, load_plan
from subquad.research.training.fine_tuning import PretrainedSettings
from subquad.research.training.model_settings import ModelSettings
from subquad.research.training.tasks.task import Task

Settings = TypeVar("Settings", ModelSettings, PretrainedSettings)


def with_plan(settings: Settings, folder: str, task: Task) -> Settings:
    """The settings with the plan's method for each layer of the model that they are for.

    Learned parameters start as they do in any model that is trained.

    Raises:
        InputError: there is no such plan, or it is for other layers than those of the model.
    """
    with as_input_error():
        plan = load_plan(folder)
        layers = [list(hf.head_counts(layer)) for layer in hf.find_layers(task.outline(settings))]
    wanted = plan.model["layers"]
    if layers != wanted:
        raise InputError(
            f"the plan {folder} was made for {shape_of(wanted)}, but the model that is to be trained has "
            f"{shape_of(layers)}; model.layers, model.heads, model.kv_heads and model.width set its sizes"
        )
    return replace(settings, method=[_method(plan, number) for number in range(len(layers))])


def _method(plan: Plan, layer: int) -> str:
    return str(plan.layers.get(layer, "full"))
