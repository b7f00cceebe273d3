"""Images of Fashion-MNIST as patches of grey levels, and a small vision transformer that classifies them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from huggingface_hub.dataclasses import strict
from jaxtyping import Float, Int
from torch import Tensor, nn

from subquad.research.papers.tasks.image import LABELS, LEVELS, Image
from subquad.research.training.model_settings import ModelSettings
from subquad.research.training.models.blocks import AttentionModel, InputPositions, Prediction, Stack
from subquad.research.training.models.configuration import AttentionConfig
from subquad.research.training.tasks.classification import FIRST
from subquad.research.training.tasks.task import Batch, Item

SIDE = 28  # pixels
START = 0.1  # standard deviation of the starting weights; 0.02, the usual one, takes a narrow model longer to leave


@strict
class PatchConfig(AttentionConfig):
    """A vision transformer.

    Attributes:
        pixels: grey levels of a patch.
    """

    model_type = "subquad-patches"

    pixels: int = 1


class PatchClassifier(AttentionModel):
    """Projected patches with positions, through blocks of attention, and the mean of all tokens to a class.

    After Dosovitskiy et al. 2021, "An Image is Worth 16x16 Words", with the mean in place of their class token.
    """

    config_class = PatchConfig

    def __init__(self, config: PatchConfig):
        super().__init__(config)
        self.patches = nn.Linear(config.pixels, config.hidden_size)
        self.input_positions = InputPositions(config)
        self.stack = Stack(config, config.num_hidden_layers)
        self.head = nn.Linear(config.hidden_size, len(LABELS))
        self.finish()

    def forward(
        self, patches: Float[Tensor, "B N P"], positions: Int[Tensor, "B N"], labels: Int[Tensor, " B"] | None = None
    ) -> Prediction:
        """Logits (B, classes), and their cross-entropy with labels."""
        x = self.input_positions(self.patches(patches), positions)
        logits = self.head(self.stack(x, None, positions).mean(1))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return Prediction(loss=loss, logits=logits)


@dataclass(frozen=True, kw_only=True)
class Patches(Image):
    """The task `image` with a token for each pixel, or for every second one of every second row, and so on.

    Attributes:
        window: side of the patch around a pixel, which its token is projected from; pixels outside the image are 0.
        stride: pixels from one token to the next; 1 makes 784 tokens and 2 makes 196.
    """

    window: int = 5
    stride: int = 1

    def model(self, settings: ModelSettings) -> PatchClassifier:
        """A new vision transformer. Its positions are those of all pixels, whatever the stride."""
        return PatchClassifier(
            settings.config(PatchConfig, longest=SIDE**2, pixels=self.window**2, initializer_range=START)
        )

    def collate(self, items: Sequence[Item]) -> Batch:
        """Patches (B, N, window²) row by row with grey levels from -1 to 1, and the numbers of their pixels."""
        symbols = torch.stack([torch.from_numpy(item["input_ids"]) for item in items]) - FIRST
        images = (2 * symbols.float() / (LEVELS - 1) - 1).view(-1, 1, SIDE, SIDE)
        patches = nn.functional.unfold(images, self.window, padding=self.window // 2, stride=self.stride).mT
        pixels = torch.arange(SIDE**2).view(SIDE, SIDE)[:: self.stride, :: self.stride].flatten()
        return {
            "patches": patches,
            "positions": pixels.expand(len(items), -1),
            "labels": torch.tensor([item["labels"] for item in items]),
        }
