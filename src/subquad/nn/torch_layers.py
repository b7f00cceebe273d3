"""A method inside `torch.nn.MultiheadAttention`: its own parameters, under their names, and its own call."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.methods import Method
from subquad.methods.core.current_shard import in_use
from subquad.nn.torch_calls import as_batches, attend_as_torch, check_widths, refuse_weights

CHANGED = {"_qkv_same_embed_dim": False}  # else torch's encoder layers, in eval mode, would go around `forward`


def is_one(module: nn.Module) -> bool:
    """True if a module is torch's `nn.MultiheadAttention`, or made from it."""
    return isinstance(module, nn.MultiheadAttention)


def sizes(layer: Any) -> dict[str, int]:
    """Head counts and width, as `Method.bind` takes them."""
    return {"heads": layer.num_heads, "kv_heads": layer.num_heads, "head_dim": layer.head_dim}


def refusal(layer: Any, method: Method) -> str | None:
    """The reason why no method, or not this one, can run in this layer; None if it can."""
    if type(layer).forward is not nn.MultiheadAttention.forward:
        return f"its class, {type(layer).__name__}, has a forward pass of its own, which swap would bypass"
    if layer.bias_k is not None or layer.add_zero_attn:
        return "it adds keys of its own (add_bias_kv or add_zero_attn), which only torch's attention knows"
    return None


def forward(
    layer: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, None]:
    """torch's layer with the method that is attached to it; arguments, shapes and masks as torch's. (out, None)."""
    refuse_weights(need_weights)
    same = key is query
    inputs, lengths, back = as_batches(query, key, value, batch_first=layer.batch_first)
    if lengths is not None and (key_padding_mask is not None or attn_mask is not None):
        raise ValueError("nested inputs carry their own lengths; leave out key_padding_mask and attn_mask")
    if layer.in_proj_weight is None:
        weights = (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight)
    else:
        weights = layer.in_proj_weight.chunk(3)
    check_widths(inputs, [weight.shape[-1] for weight in weights])
    biases = (None,) * 3 if layer.in_proj_bias is None else layer.in_proj_bias.chunk(3)
    projected = [F.linear(x, weight, bias) for x, weight, bias in zip(inputs, weights, biases, strict=True)]
    out = attend_as_torch(
        layer.subquad,
        *(x.unflatten(-1, (layer.num_heads, layer.head_dim)).transpose(1, 2) for x in projected),
        self_attention=same,
        key_padding_mask=key_padding_mask,
        attn_mask=attn_mask,
        is_causal=is_causal,
        lengths=lengths,
        parallel=in_use(self_attention=same),
        hidden=inputs[0],
        refuses_leaks=layer.training and torch.is_grad_enabled(),
        dropout_p=layer.dropout if layer.training else 0.0,
    )
    return back(layer.out_proj(out.transpose(1, 2).flatten(2))), None
