"""The class that is built for a model type, and a small random model of it."""

import importlib
import inspect
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.library.hf.survey.overrides import CLASSES
from tests.library.hf.survey.small import small_config

GENERATIVE = (
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
)  # fmt: skip
TASKS = ("MODEL_MAPPING_NAMES", *(n for n in dir(modeling_auto) if n.endswith("_MAPPING_NAMES") and "CONFIG" not in n))
LATER = {  # than the oldest transformers of ours: where they are not known, their tests are skipped
    "deepseek_v32", "fun_asr_nano_encoder", "kosmos_2_text_model", "mimi_decoder", "molmo2", "qwen3_asr_encoder",
    "qwen3_omni_moe_audio_encoder", "qwen3_omni_moe_thinker",
}  # fmt: skip
LARGEST = 150_000_000  # parameters of a model that is still called small


def model_types() -> list[str]:
    """Every model type that transformers knows. Those of `subquad.research.training.models` register too."""
    return sorted(name for name in CONFIG_MAPPING if not name.startswith("subquad"))


def model_class(model_type: str) -> type[PreTrainedModel]:
    """The class with everything that the type has: one that generates where there is one, or the bare model."""
    module = _modeling_module(model_type)
    named = [CLASSES[model_type]] if model_type in CLASSES else _names(model_type)
    for name in named:
        if isinstance(found := getattr(module, name, None), type):
            return found
    own = [c for c in vars(module).values() if _is_model_of(c, CONFIG_MAPPING[model_type], module)]
    if not own:
        raise LookupError("transformers has a config of this type, but no model class")
    return own[-1]


def _names(model_type: str) -> list[str]:
    encoder = model_type in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    tasks = TASKS if encoder and not CONFIG_MAPPING[model_type]().is_encoder_decoder else GENERATIVE + TASKS
    names: list[str] = []
    for task in tasks:
        found = dict(getattr(modeling_auto, task)).get(model_type, ())
        names += [found] if isinstance(found, str) else list(found)
    return names


def _modeling_module(model_type: str) -> Any:
    return importlib.import_module(CONFIG_MAPPING[model_type].__module__.replace("configuration_", "modeling_"))


def _is_model_of(kind: Any, config: type, module: Any) -> bool:
    return (
        inspect.isclass(kind)
        and issubclass(kind, PreTrainedModel)
        and kind.__module__ == module.__name__
        and kind.config_class is config
        and not kind.__name__.endswith("PreTrainedModel")
    )


def has_no_interface(model_type: str) -> bool:
    """Tell whether the type's own code never calls the attention interface, and no other model is part of it."""
    try:
        config = CONFIG_MAPPING[model_type]()
        module = _modeling_module(model_type)
    except Exception:  # nothing to look into
        return False
    parts = any(isinstance(value, PreTrainedConfig) for value in vars(config).values())
    return not parts and not hasattr(module, "ALL_ATTENTION_FUNCTIONS")


def small_model(model_type: str) -> PreTrainedModel:
    """A small random model in eval mode, always with the same weights, which are large enough for mistakes to show."""
    if model_type in LATER and model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no model type {model_type!r}")
    kind, config = model_class(model_type), small_config(model_type)
    with torch.device("meta"):
        size = sum(p.numel() for p in kind(config).parameters())
    if size > LARGEST:
        raise ValueError(f"the small config makes {size:,} parameters")
    torch.manual_seed(0)
    model = kind(small_config(model_type))
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(3.0)
    return model.float().eval()
