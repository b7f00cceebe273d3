"""`attention`: the one call."""

from typing import Any

from jaxtyping import Float
from torch import Tensor

from subquad.masks import Mask
from subquad.methods.base import Method
from subquad.methods.keep import Keep
from subquad.methods.registry import resolve


def attention(
    query: Float[Tensor, "B H N D"],
    key: Float[Tensor, "B G M D"],
    value: Float[Tensor, "B G M E"],
    *,
    method: str | Method,
    mask: Mask | None = None,
    is_causal: bool = False,
    bias: Float[Tensor, "#B #H N M"] | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    dropout_p: float = 0.0,
    seed: int | None = None,
    return_lse: bool = False,
    keep: Keep | None = None,
) -> Any:
    """Attention by any method, exact or not; layout, names and meanings as `scaled_dot_product_attention`.

        out_i ≈ Σ_j softmax_j(scale · q_i·k_j + bias_ij) v_j

    Args:
        query: (B,H,N,D), float64, float32, bfloat16 or float16. Normalisers are at least fp32 inside.
        key: (B,G,M,D), with G = H, or H a multiple of G under `enable_gqa`.
        value: (B,G,M,E).
        method: a name ("i-clustered"), a name with settings ("i-clustered:clusters=25") or a method object.
        mask: a `Mask`; padded queries, and queries that see no key, have output 0.
        is_causal: the same as `mask=Mask.causal(offset=0)`.
        bias: (B|1,H|1,N,M), added to the logits; for methods whose trait `bias` is true.
        scale: defaults to 1/√D.
        enable_gqa: let H/G query heads share each key head.
        dropout_p: what it drops is each method's trait `dropout`; drawn from torch's own generator.
        seed: of planes, features and starts; defaults to the method's own `seed` setting, 0.
        return_lse: return the log-sum-exp of the logits too; for methods whose trait `lse` is true.
        keep: tokens whose row and column are exact, in self-attention by methods whose trait `lse` is true: indices
            for all items ([0, -1]) or for each item, int (B,S), or a bool (B,N). Padding is never kept, and a window
            does not restrict kept tokens; all other masks do.

    Returns:
        out, (B,H,N,E) in the dtype of the inputs; with `return_lse`, (out, lse), where lse is (B,H,N) in fp32 or fp64
        and −inf for queries that see no key. Such partials over disjoint sets of keys merge to the whole.

    Raises:
        ValueError: shapes, devices, mask or method do not fit, or the method cannot do what is asked; says why.
        TypeError: an argument has the wrong type or dtype.

    >>> import torch, subquad as sq
    >>> q, k, v = torch.randn(3, 2, 4, 128, 64)
    >>> sq.attention(q, k, v, method="clustered:clusters=16", mask=sq.Mask.padding([128, 40])).shape
    torch.Size([2, 4, 128, 64])
    """
    return resolve(method)(
        query,
        key,
        value,
        mask=mask,
        is_causal=is_causal,
        bias=bias,
        scale=scale,
        enable_gqa=enable_gqa,
        dropout_p=dropout_p,
        seed=seed,
        return_lse=return_lse,
        keep=keep,
    )
