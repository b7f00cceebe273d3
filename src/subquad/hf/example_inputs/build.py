"""Put the rules together: inputs for one model."""

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from subquad.hf.example_inputs import vision
from subquad.hf.example_inputs.form import PADDINGS, Form, special_ids
from subquad.hf.example_inputs.rules import BY_NAME, BY_TYPE, IF_REQUIRED, MASK_OF, Rule, Rules
from subquad.hf.example_inputs.text import IMAGE_TOKENS
from subquad.hf.trial import undisturbed


def example_inputs(
    model: PreTrainedModel,
    *,
    batch: int = 2,
    length: int = 7,
    padding: str = "none",
    seed: int = 0,
    images: bool = True,
) -> dict[str, Tensor]:
    """Makes small random inputs that are valid for a forward pass of this model, on its device.

    Everything is read from the model's config and the signature of its forward pass: token ids avoid special tokens,
    images have the size that the model is made for, an encoder and its decoder get different lengths. A model of text
    and images gets both where the number of image tokens can be derived, and text alone otherwise.

    Args:
        model: any transformers model.
        batch: number of items.
        length: number of tokens, or frames of sound; models of a fixed length get that.
        padding: "right" or "left" shortens the last item, with an attention mask that is 0 on that side. Models
            without an attention mask know "none" only.
        seed: the same seed makes the same inputs.
        images: whether a model of text and images gets an image; without one it gets text alone.

    Raises:
        ValueError: no rule makes an input that this model needs, or it has no attention mask to pad with.
    """
    if padding not in PADDINGS:
        raise ValueError(f"padding={padding!r}, but it must be one of {', '.join(PADDINGS)}")
    with torch.device("cpu"):  # whatever the default device is, the numbers are the same ones
        inputs = _inputs_on_cpu(model, batch, length, padding, seed, images)
    return {
        name: value.to(model.device, model.dtype if value.is_floating_point() else None)
        for name, value in inputs.items()
    }


def _inputs_on_cpu(
    model: PreTrainedModel, batch: int, length: int, padding: str, seed: int, images: bool
) -> dict[str, Tensor]:
    """`example_inputs` before they are moved to the model's device."""
    form = Form(model, batch, length, padding, seed)
    special = BY_TYPE.get(model.config.model_type, {})
    inputs: dict[str, Tensor] = {}
    if images and _takes_image_tokens(form) and special.get("pixel_values", vision.image) is not None:
        inputs = _image_inputs(form, special)
    for name in form.parameters:
        rule = _rule(form, name, special)
        if rule is not None and name not in inputs:
            value = rule(form)
            if value is not None:
                inputs[name] = value
    if padding != "none" and not any("mask" in name and bool((value == 0).any()) for name, value in inputs.items()):
        raise form.missing(f"padding={padding!r}, but its forward pass has no attention mask")
    return inputs


def _rule(form: Form, name: str, special: Rules) -> Rule | None:
    if name in special:
        return special[name]
    if name == "pixel_values" and _takes_image_tokens(form):
        return None
    if name == "attention_mask" and form.model.main_input_name in MASK_OF:
        return MASK_OF[form.model.main_input_name]
    required = form.parameters[name].default is form.parameters[name].empty or name == form.model.main_input_name
    if required and name in IF_REQUIRED:
        return IF_REQUIRED[name]
    if name in BY_NAME:
        return BY_NAME[name]
    if required:
        raise form.missing(f"no rule makes {name!r}")
    return None


# ---------------------------------------------------------------------- images among text


def _takes_image_tokens(form: Form) -> bool:
    """True if image features take the places of image tokens in the text."""
    if not {"input_ids", "pixel_values"} <= form.parameters.keys() or _tower(form) is None:
        return False
    return any(name in IMAGE_TOKENS for name, _ in special_ids(form.config))


def _tower(form: Form) -> Any:
    """The outermost part of the model that makes features of images; None in a model without one."""
    return next((part for part in form.model.modules() if hasattr(part, "get_image_features")), None)


def _image_inputs(form: Form, special: Rules) -> dict[str, Tensor]:
    """The image, and its grid where the model wants one; sets the number of image tokens. Empty: text alone."""
    wanted = inspect.signature(_tower(form).get_image_features).parameters
    rules: dict[str, Rule] = {"pixel_values": vision.image}
    if "image_grid_thw" in wanted:
        rules = {"pixel_values": vision.patches, "image_grid_thw": vision.grid}
    rules |= {
        k: IF_REQUIRED[k]
        for k in wanted
        if k in IF_REQUIRED and k not in rules and wanted[k].default is wanted[k].empty
    }
    rules |= {k: v for k, v in special.items() if k in wanted and v is not None}
    inputs = {name: rule(form) for name, rule in rules.items()}
    try:
        # Undisturbed: in a model with a method by name, this call would start a swap, whose trial makes inputs again.
        with undisturbed(form.model):
            placed = {k: v.to(form.model.device) for k, v in inputs.items()}
            features = _tower(form).get_image_features(**placed)
    except Exception:  # whatever error a tower raises for an image that it does not accept: text alone is valid
        return {}
    count = _count(getattr(features, "pooler_output", features))
    if count is None or count % form.batch:
        return {}
    form.image_tokens = count // form.batch
    return inputs


def _count(features: object) -> int | None:
    """The total number of feature vectors; None if it is not known."""
    if isinstance(features, Tensor):
        return features.shape[:-1].numel() if features.ndim > 1 else None
    if isinstance(features, list | tuple):
        counts = [_count(f) for f in features]
        return None if None in counts else sum(c for c in counts if c is not None)
    return None
