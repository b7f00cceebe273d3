"""Pages of pictures of Fashion-MNIST, and a vision transformer that learns which kind of clothing most of them show."""

import math
import random
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from transformers import ViTConfig, ViTForImageClassification

import subquad as sq
from subquad.research.papers.data.idx import read_idx
from subquad.research.papers.tasks.image import LABELS

SIDE, PATCH = 28, 2  # pixels of a picture and of a patch
GRID = 4  # pictures a side of a page
TEST = 600  # pictures that no page of the training shows
POSITIONS = "embeddings.position_embeddings"


class Stage(NamedTuple):
    """A part of the training: pages of grid × grid pictures."""

    grid: int
    steps: int
    batch: int
    learning_rate: float


class Pictures(NamedTuple):
    """Pictures and what they show."""

    images: UInt8[Tensor, "pictures 28 28"]
    labels: Int[Tensor, " pictures"]


class Pages(NamedTuple):
    """Pages with grey levels from -1 to 1, the kind that half of the pictures on each show, and all pictures' kinds."""

    pixels: Float[Tensor, "pages 1 height width"]
    kinds: Int[Tensor, " pages"]
    each: Int[Tensor, "pages row column"]

    @property
    def patches(self) -> Int[Tensor, "pages patches"]:
        """The kind that each patch is a part of."""
        side = SIDE // PATCH
        return self.each.repeat_interleave(side, 1).repeat_interleave(side, 2).flatten(1)


def read(folder: Path) -> tuple[Pictures, Pictures]:
    """The pictures to learn from, and those of the test."""
    images, labels = (
        torch.from_numpy(read_idx(folder / "fashion_mnist" / f"{name}-ubyte.gz").copy())
        for name in ("images-idx3", "labels-idx1")
    )
    return Pictures(images[:-TEST], labels[:-TEST].long()), Pictures(images[-TEST:], labels[-TEST:].long())


def pages(pictures: Pictures, grid: int, count: int, draw: random.Random) -> Pages:
    """Random pages of grid × grid pictures, which may be mirrored."""
    of_kind = [(pictures.labels == kind).nonzero().flatten().tolist() for kind in range(len(LABELS))]
    pixels = torch.empty(count, grid, SIDE, grid, SIDE)
    wanted = [draw.randrange(len(LABELS)) for _ in range(count)]
    each = torch.tensor([kinds_of(kind, grid**2, draw) for kind in wanted]).view(count, grid, grid)
    for page, row, column in product(range(count), range(grid), range(grid)):
        image = pictures.images[draw.choice(of_kind[int(each[page, row, column])])]
        pixels[page, row, :, column] = image.flip(1) if draw.random() < 0.5 else image
    return Pages(pixels.view(count, 1, grid * SIDE, grid * SIDE) / 127.5 - 1, torch.tensor(wanted), each)


def kinds_of(kind: int, places: int, draw: random.Random) -> list[int]:
    """The kinds of a page's pictures, in random order: half of them this kind, and each other at most a quarter."""
    others = [other for other in range(len(LABELS)) if other != kind] * max(places // 4, 1)
    half = max(places // 2, 1)
    shown = [kind] * half + draw.sample(others, places - half)
    draw.shuffle(shown)
    return shown


def new_model(width: int, layers: int, heads: int) -> ViTForImageClassification:
    """A vision transformer of pages; its positions start as sines of row and column."""
    config = ViTConfig(
        hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=2 * width,
        image_size=GRID * SIDE, patch_size=PATCH, num_channels=1, num_labels=len(LABELS),
        initializer_range=0.1,  # from 0.02, the usual one, a narrow model takes longer to learn
    )  # fmt: skip
    model = ViTForImageClassification(config)
    with torch.no_grad():
        model.vit.embeddings.position_embeddings[0, 1:] = sines(GRID * SIDE // PATCH, width)
    return model


def sines(side: int, width: int) -> Float[Tensor, "patches width"]:
    """Sines and cosines of a patch's row and column, at wavelengths from 2π to 2π · 100 patches."""
    frequencies = 100.0 ** -torch.linspace(0, 1, width // 4)
    angles = torch.arange(side)[:, None] * frequencies
    each = torch.cat([angles.sin(), angles.cos()], 1)
    rows, columns = each[:, None].expand(-1, side, -1), each[None].expand(side, -1, -1)
    return 0.5 * torch.cat([rows, columns], 2).reshape(side * side, width)


def tokens(grid: int) -> int:
    """Tokens of a page of grid × grid pictures: its patches and the class token."""
    return (grid * SIDE // PATCH) ** 2 + 1


def window(positions: Float[Tensor, "1 N D"], grid: int, row: int = 0, column: int = 0) -> Float[Tensor, "1 n D"]:
    """The positions of a part of the page: grid × grid pictures from that row and column of pictures on."""
    each = SIDE // PATCH
    whole = positions[:, 1:].unflatten(1, (GRID * each, GRID * each))
    part = whole[:, row * each : (row + grid) * each, column * each : (column + grid) * each]
    return torch.cat([positions[:, :1], part.flatten(1, 2)], 1)


def train(
    model: ViTForImageClassification, pictures: Pictures, stages: tuple[Stage, ...], said: Callable[[str], None]
) -> None:
    """Train with exact attention, by subquad's kernel, which is faster than SDPA's forward and backward.

    The loss is the cross-entropy of the page's kind at the class token, and of its picture's kind at every patch (Jiang
    et al. 2021, "All Tokens Matter: Token Labeling for Training Better Vision Transformers").
    """
    draw = random.Random(0)
    torch.manual_seed(0)
    sq.hf.swap(model, "full:kernel=subquad")
    model.train()
    started = time.monotonic()
    for stage in stages:
        optimiser = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimiser, stage.learning_rate, total_steps=stage.steps, pct_start=0.1
        )
        running = math.log(len(LABELS))
        for step in range(1, stage.steps + 1):
            batch = pages(pictures, stage.grid, stage.batch, draw)
            corner = (draw.randint(0, GRID - stage.grid) for _ in range(2))
            part = {POSITIONS: window(model.vit.get_parameter(POSITIONS), stage.grid, *corner)}
            states = functional_call(model.vit, part, (batch.pixels,), {"interpolate_pos_encoding": True})
            logits = model.classifier(states.last_hidden_state)
            loss = F.cross_entropy(logits[:, 0], batch.kinds)
            running += 0.05 * (loss.item() - running)
            loss = loss + F.cross_entropy(logits[:, 1:].flatten(0, 1), batch.patches.flatten())
            optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            schedule.step()
            if step % max(stage.steps // 10, 1) == 0:
                seconds = time.monotonic() - started
                said(f"{stage.grid} × {stage.grid}: step {step}, loss {running:.3f}, {seconds:.0f} s")
    model.eval()
    sq.hf.restore(model)
