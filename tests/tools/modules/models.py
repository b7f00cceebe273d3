"""Small modules of every kind that `sq.compare` takes."""

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, HEADS = 32, 4


class SdpaBlock(nn.Module):
    """A block whose attention is a call of SDPA."""

    def __init__(self, is_causal=False, dropout=0.0):
        super().__init__()
        self.is_causal, self.dropout = is_causal, dropout
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        B, N, _ = x.shape
        q, k, v = self.qkv(x).view(B, N, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=self.is_causal)
        return x + self.out(out.transpose(1, 2).flatten(2))


class LayerBlock(nn.Module):
    """A block with torch's layer, whose part in the output is scaled; queries and keys are sharpened."""

    def __init__(self, share=1.0):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.share = share
        with torch.no_grad():
            self.attention.in_proj_weight[: 2 * WIDTH] *= 4.0

    def forward(self, x):
        return x + self.share * self.attention(x, x, x, need_weights=False)[0]


def encoder(layers=2):
    """torch's encoder."""
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, batch_first=True)
    return nn.TransformerEncoder(layer, layers)


def inputs(*lengths, seed=0):
    """A tensor (1, length, width) for each length."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, length, WIDTH, generator=generator) for length in lengths]
