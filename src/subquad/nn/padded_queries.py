"""Outputs of padded queries for methods whose choices must not depend on padding.

transformers and torch's layers hide padded keys but compute padded queries, and some models read them: convolutions
carry them into real frames, poolers take the first position under left padding. Methods that group queries must leave
them out, or the amount of padding would change real outputs. So they run apart, by clustered attention with few
clusters: padded tokens share one embedding, so their queries are alike, and with no more of them than clusters this is
exact.
"""

from typing import Any

from torch import Tensor
from torch.compiler import is_dynamo_compiling

from subquad.core.readable import can_be_read
from subquad.masks import Mask
from subquad.methods import BoundMethod, Clustered, Method
from subquad.methods.core.global_tokens import Keep
from subquad.nn.global_tokens import WithRows

PADDED = Clustered(clusters=16)


def attend_all(
    bound: BoundMethod | WithRows,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask,
    valid: Tensor | None,
    query_valid: Tensor | None,
    bias: Tensor | None = None,
    keep: Keep | None = None,
    hidden: Tensor | None = None,
    parallel: Any = None,
    **options: Any,
) -> Tensor:
    """Run a method for all queries, padded ones included.

    `mask` has no padding: `valid` (B,M) marks the keys that are not padding, `query_valid` (B,N) which
    queries; None: all, or not known.
    `hidden` is the layer's input. With `parallel`, padded queries of methods that group queries have attention 0: the
    exchanges of another clustering would buy outputs that no real token depends on.
    """
    visible = mask if valid is None else mask & Mask.padding(keys=valid)
    method = bound.method
    one_by_one = method.is_exact or method.traits.quadratic_baseline or mask.span is not None
    one_by_one = one_by_one or (is_dynamo_compiling() and _is_exact_step(method, query, mask) and parallel is None)
    if valid is None or query_valid is None or one_by_one:  # what a query gets does not depend on the other queries
        return bound(query, key, value, mask=visible, bias=bias, keep=keep, hidden=hidden, parallel=parallel, **options)
    visible = visible & Mask.padding(queries=query_valid)
    out = bound(query, key, value, mask=visible, bias=bias, keep=keep, hidden=hidden, parallel=parallel, **options)
    if parallel is not None:
        return out
    padded = padded_queries(query_valid, mask.is_causal) if query.shape[2] == key.shape[2] else None
    options.pop("rotary", None)  # which is for the layer's method, not for the one that runs here
    return out if padded is None else out + attend_padded(query, key, value, valid, padded, **options)


def _is_exact_step(method: Method, query: Tensor, mask: Mask) -> bool:
    """True for a step on a cache that is exact attention.

    Eager steps go a short way of their own, or are watched by an audit, which must know padding. In a compiled step,
    the compiler would write outputs that are set to 0 into the next product, which would read them for each weight.
    """
    return query.shape[2] == 1 and mask.is_causal and method.exact_queries > 0


def padded_queries(query_valid: Tensor, causal: bool) -> Tensor | None:
    """The queries (B,N) that are computed apart: the padded ones; None if there are none.

    In a causal layer those behind the last real token, which may see all real keys. Those before the first see none.
    """
    padded = ~query_valid
    if causal:
        padded = padded & (query_valid.flip(1).cumsum(1).flip(1) == 0)
    return padded if not can_be_read(padded) or bool(padded.any()) else None


def attend_padded(query: Tensor, key: Tensor, value: Tensor, valid: Tensor, padded: Tensor, **options: Any) -> Tensor:
    """Clustered attention of the padded queries to the real keys; 0 for all others."""
    gqa, mask = query.shape[1] != key.shape[1], Mask.padding(keys=valid, queries=padded)
    return PADDED(query, key, value, mask=mask, enable_gqa=gqa, **options)
