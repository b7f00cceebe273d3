"""Attention inside buckets in compiled code, which computes in fp32."""

from typing import Any

import torch
from torch import Tensor

from subquad.kernels.attention.pairs.op import attend_pairs, pairs, pairs_backward, pairs_forward
from subquad.kernels.native import interface
from subquad.kernels.precision import upcast


@attend_pairs.refusal("cpu")
def refusal(x: Any) -> str | None:
    """The reason why the compiled kernels cannot take this call; None if they can."""
    if x.dropout_p > 0:
        return f"dropout_p={x.dropout_p}, and the kernels have no dropout"
    if x.shown is not None:
        return "the kernels count all pairs of a block, and `shown` names some"
    if x.by_features:
        return "by_features=True, and the kernels' logits are products"
    if x.union:
        return "union=True, and the kernels count a key as often as it shares a bucket with the query"
    return interface.refusal(x.query)


@pairs_forward.on("cpu")
def forward(outputs: tuple[Tensor, Tensor, Tensor], x: Any) -> None:
    """The CPU backend of `attend_pairs`: (out, lse), and the residual of lse."""
    out, lse, residual = outputs
    interface.run("bucket_forward", inputs=_inputs("pairs_forward", x), out=out, lse=lse, residual=residual)


@pairs_backward.on("cpu")
def backward(grads: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], x: Any) -> None:
    """Gradients of query, key, value, key_bias and of_distance."""
    inputs, (grad_out, grad_lse, _), (out, lse, residual) = _inputs("pairs_backward", x), x.grads, x.outputs
    of_out, of_lse = (*x.query.shape[:3], x.value.shape[3]), tuple(x.query.shape[:3])
    interface.check(
        "pairs_backward",
        grad_out=(grad_out, torch.float32, of_out),
        grad_lse=(grad_lse, torch.float32, of_lse),
        out=(out, torch.float32, of_out),
        lse=(lse, torch.float32, of_lse),
        residual=(residual, torch.float32, of_lse),
    )
    *of_inputs, of_bias, of_terms = grads
    interface.run(
        "bucket_backward",
        inputs=inputs,
        out=out,
        grad_out=grad_out,
        lse=lse,
        residual=residual,
        grad_lse=grad_lse,
        **dict(zip(("grad_query", "grad_key", "grad_value"), of_inputs, strict=True)),
        grad_key_bias=None if x.key_bias is None else of_bias,
        grad_of_distance=None if x.of_distance is None else of_terms,
    )


def _inputs(op: str, x: Any) -> dict[str, Any]:
    """The checked inputs of the forward and backward kernels."""
    query, key, value = upcast(x.query, x.key, x.value)
    (B, H, N, D), (_, G, M, E) = query.shape, value.shape
    rows = 0 if x.hidden is None else x.hidden.shape[2]
    interface.check(
        op,
        (H, G),
        key=(key, torch.float32, (B, G, M, D)),
        value=(value, torch.float32, (B, G, M, E)),
        key_bias=(x.key_bias, torch.float32, (B, H, M)),
        offsets=(x.offsets, torch.int64, (B,)),
        hidden=(x.hidden, torch.bool, (B, H, max(rows, 1), M)),
    )
    distances = (1, 0) if x.of_distance is None else (1 if x.of_distance.shape[2] == 1 else N, x.of_distance.shape[3])
    interface.check(op, of_distance=(x.of_distance, torch.float32, (B, H, *distances)))
    met = pairs([t.shape for t in x.queries], [t.shape for t in x.keys])
    return (
        {"B": B, "H": H, "G": G, "N": N, "M": M, "D": D, "E": E, "threads": interface.threads(met * (D + E))}
        | {"query": query, "key": key, "value": value, "key_bias": x.key_bias, "scale": x.scale}
        | {"sets": _sets(op, (B, H), x.queries, x.keys, x.bucket, x.spans)}
        | {"causal": x.causal, "other_keys_only": x.other_keys_only, "offset": x.offset, "offsets": x.offsets}
        | {"hidden": x.hidden, "hidden_rows": rows}
        | {"of_distance": x.of_distance, "distance_rows": distances[0], "distances": distances[1]}
    )


def _sets(
    op: str, heads: tuple[int, int], queries: list[Tensor], keys: list[Tensor], bucket: list[Tensor], spans: list[int]
) -> list[dict[str, Any]]:
    """The sets, checked. Buckets of the same keys are the same buckets, whose keys the kernel packs once."""
    sets: list[dict[str, Any]] = []
    whole = {id(x): x.contiguous() for x in keys}  # a tensor that is in several sets stays one
    first_of: dict[tuple[int, torch.Size, int], int] = {}
    buckets = 0
    for of_queries, of_keys, named, span in zip(queries, keys, bucket, spans, strict=True):
        blocks = of_queries.shape[2] if named.numel() > 0 else min(of_queries.shape[2], of_keys.shape[2])
        interface.check(
            op,
            queries=(of_queries, torch.int64, (*heads, blocks, of_queries.shape[3])),
            keys=(of_keys, torch.int64, (*heads, *of_keys.shape[2:])),
            bucket=(named, torch.int64, (0,) if named.ndim == 1 else (*heads, blocks)),
        )
        of_keys = whole[id(of_keys)]
        same = of_keys.data_ptr(), of_keys.shape, span
        if same not in first_of:
            first_of[same] = buckets
            buckets += of_keys.shape[2]
        sets.append(
            {"blocks": blocks, "query_slots": of_queries.shape[3], "queries": of_queries, "span": span}
            | {"buckets": of_keys.shape[2], "key_slots": of_keys.shape[3], "keys": of_keys, "first": first_of[same]}
            | {"bucket": named if named.numel() > 0 else None}
        )
    return sets
