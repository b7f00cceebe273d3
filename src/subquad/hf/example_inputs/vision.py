"""Images and videos."""

import torch
from torch import Tensor

from subquad.hf.example_inputs.form import Form

ANY_SIZE = 64  # for models that take images of every size


def image_size(form: Form) -> tuple[int, int]:
    """(height, width) that the model is made for."""
    for config in _vision_configs(form):
        for name in ("image_size", "img_size", "pretrained_img_size"):
            size = getattr(config, name, None)
            if isinstance(size, int):
                return size, size
            if isinstance(size, list | tuple) and len(size) == 2 and all(isinstance(n, int) for n in size):
                return int(size[0]), int(size[1])
            if isinstance(size, dict) and "height" in size:
                return int(size["height"]), int(size["width"])
    return ANY_SIZE, ANY_SIZE


def patch_size(form: Form) -> int:
    """The side of a patch."""
    return next((n for c in _vision_configs(form) if isinstance(n := getattr(c, "patch_size", None), int)), 16)


def channels(form: Form) -> int:
    """How many colours an image has."""
    for config in _vision_configs(form):
        for name in ("num_channels", "in_channels", "in_chans", "num_input_channels"):
            if isinstance(n := getattr(config, name, None), int):
                return n
    return 3


def _vision_configs(form: Form) -> list[object]:
    nested = [getattr(form.config, n, None) for n in ("vision_config", "backbone_config", "image_model_config")]
    encoder = getattr(form.config, "encoder", None)
    found = [encoder, *nested[:1], form.config, *nested[1:]]
    return [c for c in found if c is not None]


def image(form: Form) -> Tensor:
    """One image an item."""
    return form.floats(form.batch, channels(form), *image_size(form))


def images(form: Form) -> Tensor:
    """One image an item, on an axis of images."""
    return image(form)[:, None]


def video(form: Form) -> Tensor:
    """Frames of images."""
    frames = form.number("num_frames", "frames_per_clip", default=4)
    return form.floats(form.batch, frames, channels(form), *image_size(form))


def all_pixels(form: Form) -> Tensor:
    """Which pixels of the image are real: all."""
    return torch.ones(form.batch, *image_size(form), dtype=torch.long)


# ---------------------------------------------------------------------- images as rows of patches


def grid(form: Form) -> Tensor:
    """(frames, rows, columns) of patches for each image."""
    side = 2 * form.number("spatial_merge_size", "merge_size", default=2)
    return torch.tensor([[1, side, side]] * form.batch)


def patches(form: Form) -> Tensor:
    """The patches of every image, one after the other."""
    frames = form.number("temporal_patch_size", default=1)
    width = channels(form) * frames * patch_size(form) ** 2
    return form.floats(int(grid(form).prod(-1).sum()), width)
