"""Images and videos."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from subquad.hf.example_inputs.form import Form, configs

ANY_SIZE = 64  # for models that accept images of every size
SIDE = 4  # patches of an image that is given as rows of patches


def image_size(form: Form) -> tuple[int, int]:
    """(height, width) that the model is made for."""
    for size in _values(form, "image_size", "img_size", "pretrained_img_size", "crop_size"):
        if isinstance(size, int):
            return size, size
        if isinstance(size, list | tuple) and len(size) == 2 and all(isinstance(n, int) for n in size):
            return int(size[0]), int(size[1])
        if isinstance(size, dict) and "height" in size:
            return int(size["height"]), int(size["width"])
    return ANY_SIZE, ANY_SIZE


def patch_size(form: Form) -> int:
    """The side of a patch."""
    return next((n for n in _values(form, "patch_size") if isinstance(n, int)), 16)


def channels(form: Form) -> int:
    """The number of colours in an image."""
    names = ("num_channels", "in_channels", "in_chans", "num_input_channels")
    return next((n for n in _values(form, *names) if isinstance(n, int)), 3)


def _values(form: Form, *names: str) -> Iterator[Any]:
    """The values of the configs under these names; those of vision parts come first."""
    named = sorted(
        configs(form.config), key=lambda c: not any(word in c.model_type for word in ("vision", "vit", "image"))
    )
    return (getattr(config, name, None) for config in named for name in names)


def image(form: Form) -> Tensor:
    """One image an item."""
    return form.floats(form.batch, channels(form), *image_size(form))


def video(form: Form) -> Tensor:
    """Frames of images."""
    frames = form.number("num_frames", "frames_per_clip", default=4)
    return form.floats(form.batch, frames, channels(form), *image_size(form))


def spatial_shapes(form: Form) -> Tensor:
    """(rows, columns) of patches in each image; the last one has fewer where padding is asked for."""
    shapes = torch.tensor([[SIDE, SIDE]] * form.batch)
    shapes[-1, 0] -= 2 * int(form.padding != "none")  # an even number, for towers that merge patches
    return shapes


def patch_rows(form: Form) -> Tensor:
    """The patches of each image as rows, (B, patches, numbers of a patch)."""
    return form.floats(form.batch, SIDE * SIDE, channels(form) * patch_size(form) ** 2)


def patch_mask(form: Form) -> Tensor:
    """A mask of the rows that are patches of the image: 1 or 0."""
    valid = spatial_shapes(form).prod(-1)
    return (torch.arange(SIDE * SIDE) < valid[:, None]).long()


def numbered_rows(form: Form) -> Tensor:
    """Patches as rows that start with their row and column, as Pix2Struct takes them."""
    rows = form.floats(form.batch, SIDE * SIDE, form.number("patch_embed_hidden_size"))
    patch = torch.arange(SIDE * SIDE)
    numbers = torch.stack([patch // SIDE + 1, patch % SIDE + 1], dim=-1).float()
    return torch.cat([numbers.expand(form.batch, -1, -1), rows], dim=-1)


def grid(form: Form) -> Tensor:
    """(frames, rows, columns) of patches for each image."""
    side = 2 * form.number("spatial_merge_size", "merge_size", default=2)
    return torch.tensor([[1, side, side]] * form.batch)


def patches(form: Form) -> Tensor:
    """The patches of every image, one after the other."""
    frames = form.number("temporal_patch_size", "patch_temporal", default=1)
    return form.floats(int(grid(form).prod(-1).sum()), channels(form) * frames * patch_size(form) ** 2)


def patch_images(form: Form) -> Tensor:
    """The patches of every image, each a small image."""
    return form.floats(int(grid(form).prod(-1).sum()), channels(form), patch_size(form), patch_size(form))
