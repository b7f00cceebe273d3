"""A method inside timm's `Attention`: its own forward pass, with the method in its call of SDPA."""

from typing import Any

from torch import Tensor, nn

from subquad.methods import Method
from subquad.methods.core.current_shard import refuse_in_use
from subquad.nn.interception import SdpaCalls
from subquad.nn.sdpa_arguments import mask_and_bias

CHANGED: dict[str, Any] = {}


def is_one(module: nn.Module) -> bool:
    """True if a module is timm's `Attention`, the layer of its vision transformers, or made from it."""
    return any(cls.__name__ == "Attention" and cls.__module__.startswith("timm.") for cls in type(module).__mro__)


def sizes(layer: Any) -> dict[str, int]:
    """Head counts and width, as `Method.bind` takes them."""
    return {"heads": layer.num_heads, "kv_heads": layer.num_heads, "head_dim": layer.head_dim}


def refusal(layer: Any, method: Method) -> str | None:
    """The reason why no method, or not this one, can run in this layer; None if it can."""
    if not layer.fused_attn:
        return "its fused_attn is False, so it computes the weights itself; set timm.layers.set_fused_attn(True) first"
    return None


def forward(layer: Any, *args: Any, **kwargs: Any) -> Tensor:
    """timm's forward pass around the method that is attached to the layer; ValueError where it calls no SDPA."""
    ran = []

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        ran.append(True)
        if attn_mask is not None:
            refuse_in_use("a mask of timm's Attention", "leave it out, or run the layer on one rank")
        mask, bias = mask_and_bias(layer.subquad.method, query, key, attn_mask, is_causal)
        options["hidden"] = args[0] if args else kwargs.get("x")
        return layer.subquad(query, key, value, mask=mask, bias=bias, dropout_p=dropout_p, **options)

    with SdpaCalls(attend, _cannot):
        out = type(layer).forward(layer, *args, **kwargs)
    if not ran:
        raise ValueError(
            f"this {type(layer).__name__} called no scaled_dot_product_attention, so {layer.subquad.method} did not "
            "run; call sq.nn.restore(module)"
        )
    return out


def _cannot(reason: str) -> None:
    raise ValueError(reason)
