"""`attention`: the one call."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from subquad.core.readable import can_be_read
from subquad.kernels.tokens.nested_padding import pad
from subquad.kernels.tokens.rotary import Rotary
from subquad.masks import Mask
from subquad.methods.core.current_shard import in_use
from subquad.methods.core.global_tokens import Keep
from subquad.methods.core.method import Method
from subquad.methods.core.names import resolve


def attention(
    query: Float[Tensor, "B H N D"],
    key: Float[Tensor, "B G M D"],
    value: Float[Tensor, "B G M E"],
    *,
    method: str | Method,
    mask: Mask | None = None,
    is_causal: bool = False,
    bias: Float[Tensor, "#B #H N _"] | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    dropout_p: float = 0.0,
    seed: int | None = None,
    return_lse: bool = False,
    keep: Keep | None = None,
    parallel: Any = None,
    rotary: Rotary | None = None,
    attn_mask: Tensor | None = None,
) -> Any:
    """Compute attention with any method, in the layout of `scaled_dot_product_attention`, with `mask` for `attn_mask`.

        out_i ≈ Σ_j softmax_j(scale · q_i·k_j + bias_ij) v_j

    Args:
        query: (B,H,N,D), float64, float32, bfloat16 or float16. Normalisers are at least fp32 inside. Nested tensors
            (B,H,items' length,D) carry their own lengths; reading them synchronises with the device. `bias`, `keep`
            and `return_lse` are not supported with them.
        key: (B,G,M,D), with G = H, or H a multiple of G under `enable_gqa`.
        value: (B,G,M,E).
        method: a name ("i-clustered"), a name with settings ("i-clustered:clusters=25") or a method object.
        mask: a `Mask`; padded queries, and queries that see no key, have output 0.
        is_causal: the same as `mask=Mask.causal(offset=0)`.
        bias: (B|1,H|1,N,M), added to the logits; for methods whose trait `bias` is true.
        scale: defaults to 1/√D.
        enable_gqa: let H/G query heads share each key head.
        dropout_p: rate of dropout, of the kind in the method's trait `dropout`; uses torch's own generator.
        seed: random seed for projections, random features and k-means initialisation; defaults to the method's own
            `seed` setting, 0.
        return_lse: return the log-sum-exp of the logits too; for methods whose trait `lse` is true.
        keep: tokens whose row and column are exact, in self-attention by methods whose trait `lse` is true: indices
            for all items ([0, -1]) or for each item, int (B,S), or a bool (B,N). Padding is never kept, and a window
            does not restrict kept tokens; all other masks do. A bool synchronises with the device once.
        parallel: a `sq.distributed.Sequence`, of whose tokens query, key, value and the mask's tensors are this rank's
            part; by default that of `sq.distributed.use`, where the call is inside its block. Lengths of padded items,
            the mask's offset and indices in `keep` count all tokens; a bias and a dense mask hold the rows of this
            rank's queries, for all keys. Dropout is not supported with it.
        rotary: a `sq.Rotary`, by which positions turned queries and keys (RoPE), for methods that compare queries of
            different positions: "clustered-tail:queries=earlier". Others do not read it.
        attn_mask: not accepted; use `mask=sq.Mask.from_sdpa(attn_mask)`, and `bias=` for floats that are added.

    Returns:
        out, (B,H,N,E) in the dtype of the inputs, nested where `query` is; with `return_lse`, (out, lse), where lse is
        (B,H,N) in fp32 or fp64 and −inf for queries that see no key. Such partials over disjoint sets of keys merge to
        the whole if the method meets each key once. For inputs in bf16, kernels with products in bf16 compute lse with
        an error of about 3e-6; for a window, SDPA's own kernel computes it, with 6e-5 in 16 bits.

    Raises:
        ValueError: shapes, devices, mask or method do not fit, or the method does not support the call.
        TypeError: an argument has the wrong type or dtype.

    >>> import torch, subquad as sq
    >>> q, k, v = torch.randn(3, 2, 4, 128, 64)
    >>> sq.attention(q, k, v, method="clustered:clusters=16", mask=sq.Mask.padding([128, 40])).shape
    torch.Size([2, 4, 128, 64])
    """
    if attn_mask is not None:
        raise TypeError(
            "sq.attention does not accept attn_mask: give mask=sq.Mask.from_sdpa(attn_mask) for padding, causality or "
            "windows, mask=sq.Mask.dense(…) for any other bool, or bias= for floats that are added to the logits"
        )
    parallel = in_use(parallel)
    options: dict[str, Any] = {
        "rotary": rotary,
        "is_causal": is_causal,
        "scale": scale,
        "enable_gqa": enable_gqa,
        "dropout_p": dropout_p,
        "seed": seed,
    }
    if any(isinstance(x, Tensor) and x.is_nested for x in (query, key, value)):
        others = {"bias": bias is not None, "keep": keep is not None, "parallel": parallel is not None}
        _refuse_beside_nested(query, key, value, return_lse=return_lse, **others)
        return _nested_attention(query, key, value, resolve(method), mask or Mask(), options)
    chosen = resolve(method)
    options |= {"mask": mask, "bias": bias, "return_lse": return_lse, "keep": keep, "parallel": parallel}
    if parallel is not None:
        return chosen(query, key, value, **options)  # which keeps what ranks send out of compiled graphs
    return chosen.run(*chosen.prepare(query, key, value, **options))


def _nested_attention(
    query: Tensor, key: Tensor, value: Tensor, method: Method, mask: Mask, options: dict[str, Any]
) -> Tensor:
    """Attention on nested tensors: on padded ones, under a mask of the padding."""
    queries, keys, values = (pad(x.transpose(1, 2)) for x in (query, key, value))
    if can_be_read(keys.lengths) and not torch.equal(keys.lengths, values.lengths):
        raise ValueError(
            f"`key` has items of {_first(keys.lengths)} tokens but `value` has items of {_first(values.lengths)}; they "
            "must match"
        )
    mask = mask & Mask.padding(queries=queries.lengths, keys=keys.lengths)
    out = method(*(x.values.transpose(1, 2) for x in (queries, keys, values)), mask=mask, **options)
    return queries.nested_like_it(out.transpose(1, 2)).transpose(1, 2)


def _first(lengths: Tensor) -> str:
    """The first lengths of items, for a message."""
    return ", ".join(map(str, lengths[:5].tolist())) + (", …" if len(lengths) > 5 else "")


def _refuse_beside_nested(query: Tensor, key: Tensor, value: Tensor, **options: bool) -> None:
    """Raise ValueError for what nested tensors are not supported with."""
    flat = [name for name, x in (("query", query), ("key", key), ("value", value)) if not x.is_nested]
    if flat:
        raise ValueError(f"`{flat[0]}` is not nested but others are; give all three alike")
    for name in (name for name, asked in options.items() if asked):
        raise ValueError(
            f"`{name}` is not supported with nested tensors; pad them, torch.nested.to_padded_tensor(x, 0.0), and give "
            "mask=sq.Mask.padding(lengths)"
        )
