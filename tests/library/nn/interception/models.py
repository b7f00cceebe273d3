"""Small random models outside of transformers' attention interface, as a user would call them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from subquad.testing.oracle import normal

Run = tuple[nn.Module, Callable[[nn.Module], Any]]


class CausalBlock(nn.Module):
    """A module of a user: causal attention by a call of SDPA."""

    def __init__(self, width: int = 32, heads: int = 4):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        B, N, width = x.shape
        q, k, v = self.qkv(x).view(B, N, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(out.transpose(1, 2).flatten(2))


def torch_encoder() -> Run:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    hidden = torch.arange(50) >= torch.tensor([[50], [20]])
    return nn.TransformerEncoder(layer, 2), lambda model: model(normal(2, 50, 32), src_key_padding_mask=hidden)[~hidden]


def torch_decoder() -> Run:
    layer = nn.TransformerDecoderLayer(32, 4, 64, batch_first=True)
    causal = nn.Transformer.generate_square_subsequent_mask(20)
    inputs = normal(2, 20, 32), normal(2, 50, 32, seed=1)
    return nn.TransformerDecoder(layer, 2), lambda model: model(*inputs, tgt_mask=causal)


def own_module() -> Run:
    return nn.Sequential(CausalBlock(), CausalBlock()), lambda model: model(normal(2, 50, 32))


def timm_vit() -> Run:
    timm = pytest.importorskip("timm")
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2, embed_dim=48, num_heads=4)
    return model, lambda model: model(normal(1, 3, 64, 64))


def diffusers_dit() -> Run:
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        num_layers=2,
        sample_size=16,
        num_embeds_ada_norm=10,
    )
    step = {"timestep": torch.tensor([3]), "class_labels": torch.tensor([1])}
    return model, lambda model: model(normal(1, 4, 16, 16), **step).sample


def diffusers_unet() -> Run:
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.UNet2DConditionModel(
        sample_size=16,
        layers_per_block=1,
        block_out_channels=(16, 32),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=24,
        norm_num_groups=8,
    )
    text = {
        "encoder_hidden_states": normal(1, 7, 24, seed=1),
        "encoder_attention_mask": torch.tensor([[1, 1, 1, 1, 0, 0, 0]]),
    }
    return model, lambda model: model(normal(1, 4, 16, 16), torch.tensor([3]), **text).sample


MODELS: dict[str, Callable[[], Run]] = {  # by their names in docs/how-to/any-model.md
    "`nn.TransformerEncoder`, padded": torch_encoder,
    "`nn.TransformerDecoder`, causal": torch_decoder,
    "own causal module that calls SDPA": own_module,
    "timm `vit_tiny_patch16_224`": timm_vit,
    "diffusers `DiTTransformer2DModel`": diffusers_dit,
    "diffusers `UNet2DConditionModel`, masked text": diffusers_unet,
}


def made(name: str) -> Run:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, run = MODELS[name]()
    return model.eval(), run
