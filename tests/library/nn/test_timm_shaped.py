"""A stand-in for timm's `Attention`, with its attributes and its call, where timm's torchvision cannot be loaded.

`tests/library/nn/test_swapping.py` has the tests of timm itself, which skip themselves without it.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import subquad as sq
from subquad.testing.oracle import gradients, normal
from tests.library.nn.test_swapping import ROUGH


class Attention(nn.Module):
    """Attributes, order of parameters and forward pass as in timm 1.0.31."""

    __module__ = "timm.layers.attention"

    def __init__(self, dim: int, num_heads: int, qk_norm: bool = False, gated: bool = False):
        super().__init__()
        self.num_heads, self.head_dim, self.attn_dim = num_heads, dim // num_heads, dim
        self.scale, self.fused_attn = self.head_dim**-0.5, True
        self.qkv = nn.Linear(dim, 3 * dim)
        self.q_norm = nn.LayerNorm(self.head_dim) if qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(self.head_dim) if qk_norm else nn.Identity()
        self.attn_drop, self.norm = nn.Dropout(0.0), nn.Identity()
        self.gate = nn.Linear(dim, dim) if gated else None
        self.proj, self.proj_drop = nn.Linear(dim, dim), nn.Dropout(0.0)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        B, N, _ = x.shape
        gate = None if self.gate is None else self.gate(x).sigmoid()
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        if self.fused_attn:
            dropout = self.attn_drop.p if self.training else 0.0
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, dropout_p=dropout, is_causal=is_causal)
        else:
            out = self.attn_drop((self.scale * q @ k.transpose(-2, -1)).softmax(-1)) @ v
        out = self.norm(out.transpose(1, 2).reshape(B, N, self.attn_dim))
        return self.proj_drop(self.proj(out if gate is None else out * gate))


@pytest.fixture(params=[{}, {"qk_norm": True}, {"gated": True}], ids=str)
def layers(request) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Attention(48, 4, **request.param) for _ in range(2))).eval()


def test_the_method_runs_in_it_and_is_taken_out(layers):
    x = normal(2, 17, 48)
    want, names = layers(x), list(layers.state_dict())
    assert sq.nn.swap(layers, "full").kinds == {"0": "Attention", "1": "Attention"}
    weight = layers[0].qkv.weight
    torch.testing.assert_close(layers(x), want)
    torch.testing.assert_close(gradients(layers(x), weight), gradients(want, weight), atol=1e-5, rtol=1e-4)
    assert list(layers.state_dict()) == names
    sq.nn.swap(layers, ROUGH)
    assert not torch.allclose(layers(x), want, atol=1e-4)
    sq.nn.restore(layers)
    assert torch.equal(layers(x), want)


def test_masks_are_read_and_causality_is_refused_where_a_method_has_none(layers):
    x, valid = normal(2, 17, 48), torch.arange(17) < torch.tensor([17, 9])[:, None]
    want = layers[0](x, attn_mask=valid[:, None, None])
    sq.nn.swap(layers, "full")
    torch.testing.assert_close(layers[0](x, attn_mask=valid[:, None, None]), want)
    sq.nn.swap(layers, "smyrf")
    with pytest.raises(ValueError, match="does not support a causal mask"):
        layers[0](x, is_causal=True)


def test_a_layer_that_calls_no_sdpa_is_refused(layers):
    layers[1].fused_attn = False
    with pytest.raises(ValueError, match="layer '1' cannot run full: its fused_attn is False"):
        sq.nn.swap(layers, "full")
