"""Images among text: as many image tokens as the model's vision tower makes features."""

import inspect
from typing import Any

import torch
from torch import Tensor

from subquad.hf.example_inputs import vision
from subquad.hf.example_inputs.form import Form, special_ids
from subquad.hf.example_inputs.rules import IF_REQUIRED, Rule
from subquad.hf.example_inputs.text import IMAGE_TOKENS


def takes_image_tokens(form: Form) -> bool:
    """Whether image features take the places of image tokens in the text."""
    if not {"input_ids", "pixel_values"} <= form.parameters.keys() or tower(form) is None:
        return False
    return any(name in IMAGE_TOKENS for name, _ in special_ids(form.config))


def tower(form: Form) -> Any:
    """The outermost part of the model that makes features of images; None in a model without one."""
    return next((part for part in form.model.modules() if hasattr(part, "get_image_features")), None)


def image_inputs(form: Form, special: dict[str, Any]) -> dict[str, Tensor]:
    """The image, and its grid where the model wants one; sets the number of image tokens. Empty: text alone."""
    wanted = inspect.signature(tower(form).get_image_features).parameters
    rules: dict[str, Rule] = {"pixel_values": vision.image}
    if "image_grid_thw" in wanted:
        rules = {"pixel_values": vision.patches, "image_grid_thw": vision.grid}
    rules |= {
        k: IF_REQUIRED[k]
        for k in wanted
        if k in IF_REQUIRED and k not in rules and wanted[k].default is wanted[k].empty
    }
    rules |= {k: v for k, v in special.items() if k in wanted and v is not None}
    found = {name: rule(form) for name, rule in rules.items()}
    try:
        with torch.no_grad():
            placed = {k: v.to(form.model.device) for k, v in found.items()}
            features = tower(form).get_image_features(**placed)
    except Exception:  # whatever a tower says to an image that it does not take: text alone is valid
        return {}
    count = _count(getattr(features, "pooler_output", features))
    if count is None or count % form.batch:
        return {}
    form.image_tokens = count // form.batch
    return found


def _count(features: object) -> int | None:
    """How many feature vectors there are in all."""
    if isinstance(features, Tensor):
        return features.shape[:-1].numel() if features.ndim > 1 else None
    if isinstance(features, list | tuple):
        counts = [_count(f) for f in features]
        return None if None in counts else sum(c for c in counts if c is not None)
    return None
