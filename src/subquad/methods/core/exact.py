"""Exact attention of a call, for "full" and for the exact parts of other methods.

On CPUs with AVX2, subquad's kernels are faster than SDPA; on ARM, where they run too, their speed was not measured. One
is for up to 32 queries without a gradient (`kernels.attention.steps`), as in steps on a cache; it knows causal masks,
offsets, windows and padding. The other (`kernels.attention.exact`) knows causal masks and padding. Other masks, a bias
and dropout are SDPA's, and so are few queries with few keys. SDPA does not return the log-sum-exp: our kernels do, or
for other masks the one below SDPA (`kernels.attention.blockwise.partial`); elsewhere, with a bias or with dropout, the
logits are computed once more, for some queries at a time.

Subquad's kernels do not read padding. SDPA multiplies it by 0, so `exact` clears what is not finite in padding before
it calls SDPA; `exact_by_sdpa`, the baseline, does not.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from subquad.kernels import native
from subquad.kernels.attention.blockwise.partial import fused_partial, is_fused, is_fused_on_gpu
from subquad.kernels.attention.exact.op import exact_partial
from subquad.kernels.attention.softmax import visible_logsumexp
from subquad.kernels.attention.steps.op import MOST_QUERIES, attend_few, prepare_few
from subquad.kernels.precision import upcast
from subquad.kernels.tokens.heads import repeat_heads
from subquad.kernels.tokens.padding import cleared_inputs
from subquad.kernels.transforms import exact_attention
from subquad.methods.core.call import Attention, Call, Partial

QUERIES, PAIRS = 16, 2**12  # with fewer, a call of SDPA is cheaper (`benchmarks/exact_kernel.py` times longer ones)
# Fewer keys for up to 32 queries, in fp32 and in 16 bits: a call of SDPA is cheaper.
KEYS, KEYS_16_BITS = 512, 64
CHUNK = 2**22  # logits of a head that are in memory at a time


def sdpa(query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor:
    """Exact attention by the cheapest SDPA call that expresses the mask. Queries that see no key get 0."""
    options, blind = _sdpa_options(query, key, call)
    out = exact_attention(query, key, value, **options)
    return out if blind is None else out.masked_fill(blind, 0.0)


def _sdpa_options(query: Tensor, key: Tensor, call: Call) -> tuple[dict[str, Any], Tensor | None]:
    """The options of SDPA, and which queries see no key (None: each sees one)."""
    mask, bias, gqa = call.mask, call.bias, False
    if query.shape[1] != key.shape[1]:  # a branch: where the number of heads is symbolic, SDPA allows no comparison
        gqa = True
    options: dict[str, Any] = {"scale": call.scale, "dropout_p": call.dropout_p, "enable_gqa": gqa}
    if mask.only_causal and bias is None and call.scale > 0:  # torch hides keys before it scales: −∞·0 is NaN
        return options | {"is_causal": True}, None
    visible = mask.visible(query.shape[2], key.shape[2], query.device)
    if visible is None:
        return options | {"attn_mask": None if bias is None else bias.to(query.dtype)}, None
    blind = ~visible.any(-1, keepdim=True)
    # A row without a visible key is NaN in some SDPA kernels: let it see all, then make it 0.
    attn_mask = visible | blind
    if bias is not None:
        attn_mask = bias.to(query.dtype).masked_fill(~attn_mask, -torch.inf)
    return options | {"attn_mask": attn_mask}, blind


def exact(query: Tensor, key: Tensor, value: Tensor, call: Call) -> Partial:
    """Exact attention, with its log-sum-exp where the call wants it. Padding may hold NaN and infinity."""
    few = few_arguments(query, key, value, call) if _few_pay(query, key, call) else None
    partial = None if few is None else attend_few.if_taken(*few[0], **few[1])
    if partial is not None:
        return partial if call.wants_lse else (partial[0], None)
    mask, plain = call.mask, call.bias is None and not call.dropout_p
    with_lse = call.wants_lse and plain and mask.only_later_or_padded and is_fused(query)
    if with_lse or (not call.wants_lse and sdpa_instead(query, key, value, call) is None):
        tensors, options = _kernel_arguments(query, key, value, call)
        return exact_partial(*tensors, **options)
    query, key, value = cleared_inputs(query, key, value, mask)
    if not call.wants_lse:
        return sdpa(query, key, value, call), None
    if plain and (is_fused(query) or is_fused_on_gpu(query)):
        causal = mask.only_causal
        allowed = None if causal else mask.visible(query.shape[2], key.shape[2], query.device)
        return fused_partial(query, key, value, allowed, causal=causal, scale=call.scale)
    parts = [visible_logsumexp(logits, visible) for logits, visible in logits_of(query, key, call)]
    return sdpa(query, key, value, call), torch.cat(parts, dim=2)


def prepare_exact(query: Tensor, key: Tensor, value: Tensor, call: Call) -> Attention:
    """`exact` as a function of tensors like these, whose numbers alone differ: all else is computed here, once.

    No tensor is to be differentiated, and the call does not want the log-sum-exp.
    """
    few = few_arguments(query, key, value, call) if _few_pay(query, key, call) else None
    attention = None if few is None else prepare_few(*few[0], **few[1])
    if attention is not None:
        return attention
    padded = call.mask.key_padding(key.shape[2]) is not None or call.mask.query_padding(query.shape[2]) is not None
    if padded or sdpa_instead(query, key, value, call) is None:
        return lambda query, key, value: exact(query, key, value, call)[0]
    return prepare_sdpa(query, key, value, call)


def prepare_sdpa(query: Tensor, key: Tensor, value: Tensor, call: Call) -> Attention:
    """`sdpa` as a function of tensors like these, which are not to be differentiated."""
    options, blind = _sdpa_options(query, key, call)
    if blind is None:
        return partial(exact_attention, **options)
    return lambda query, key, value: exact_attention(query, key, value, **options).masked_fill(blind, 0.0)


def sdpa_instead(query: Tensor, key: Tensor, value: Tensor, call: Call) -> str | None:
    """The reason why SDPA computes the output of a call, and not subquad's kernel; None if the kernel does."""
    if call.bias is not None or call.dropout_p:
        return "subquad's kernel supports neither a bias nor dropout, so SDPA ran"
    few = few_arguments(query, key, value, call) if _few_pay(query, key, call) else None
    if few is not None and attend_few.takes(*few[0], **few[1]):
        return None
    if not call.mask.only_later_or_padded:
        return "subquad's kernel supports no masks but causality and padding for more than a few queries, so SDPA ran"
    if not _pays(query, key):
        return "SDPA is faster for few queries and keys, on this device or on this processor, so it ran"
    tensors, options = _kernel_arguments(query, key, value, call)
    return None if exact_partial.takes(*tensors, **options) else "subquad's kernel does not run here, so SDPA ran"


def few_arguments(
    query: Tensor, key: Tensor, value: Tensor, call: Call
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments of `attend_few`, in order and by name; None where it does not know the mask, or does not pay."""
    (B, _, N, _), M, mask = query.shape, key.shape[2], call.mask
    if call.bias is not None or call.dropout_p or not _kernels_run(query) or N > MOST_QUERIES:
        return None
    if len(mask.ids) + len(mask.allowed) > 0:
        return None
    options: dict[str, Any] = {"causal": mask.is_causal, "window": mask.span, "scale": call.scale, "offset": 0}
    if mask.is_causal or mask.span is not None:
        if isinstance(mask.offset, Tensor):
            options["offsets"] = mask.offset.to(query.device, torch.long).reshape(-1).expand(B)
        else:
            options["offset"] = mask.offset or 0
    options["valid_queries"] = mask.query_padding(N)
    tensors = query, key, value, mask.key_padding(M)
    return tensors, options


def _few_pay(query: Tensor, key: Tensor, call: Call) -> bool:
    """True if `attend_few`, if it takes the call, is faster than SDPA: except for few keys that all queries see."""
    if not _kernels_run(query):  # first: a comparison of lengths would be a condition of an exported program
        return False
    keys, mask = key.shape[2], call.mask
    hides = mask.span is not None or isinstance(mask.offset, Tensor) or len(mask.keys) + len(mask.both) > 0
    least = KEYS if query.element_size() > 2 else KEYS_16_BITS
    if hides or call.wants_lse or keys >= least:
        return True
    offset = mask.offset if isinstance(mask.offset, int) else 0
    return mask.is_causal and not mask.only_causal and offset < keys - 1


def _kernels_run(query: Tensor) -> bool:
    """True if subquad's kernels may compute exact attention here.

    Not where a graph is exported, which would need subquad then, nor on x86-64 without AVX2.
    """
    return query.device.type == "cpu" and not torch.compiler.is_exporting() and native.is_vectorised()


def _kernel_arguments(query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of `exact_partial`, in order and by name."""
    mask = call.mask
    offset = mask.offset if isinstance(mask.offset, int) else 0
    options: dict[str, Any] = {"causal": mask.is_causal, "offset": offset, "scale": call.scale}
    options |= {"valid_queries": mask.query_padding(query.shape[2])}
    return (query, key, value, mask.key_padding(key.shape[2])), options


def exact_by_sdpa(query: Tensor, key: Tensor, value: Tensor, call: Call) -> Partial:
    """Exact attention of a baseline: by SDPA, except where the call wants the log-sum-exp."""
    return exact(query, key, value, call) if call.wants_lse else (sdpa(query, key, value, call), None)


def _pays(query: Tensor, key: Tensor) -> bool:
    """True if subquad's kernel, if it supports the call, is faster than SDPA: for more than a few queries and pairs."""
    N, M = query.shape[2], key.shape[2]
    return bool(_kernels_run(query) and N >= QUERIES and N * M >= PAIRS)


def logits_of(query: Tensor, key: Tensor, call: Call) -> Iterator[tuple[Tensor, Tensor | None]]:
    """For a few queries at a time, yield their logits in fp32 or better and the keys that they see (None: all).

    A bias of −∞ hides a key, as in SDPA.
    """
    N, M = query.shape[2], key.shape[2]
    query, key = upcast(query, repeat_heads(key, query.shape[1]))
    visible = call.mask.visible(N, M, query.device)
    # All queries together where they are traced: a number of portions would fix the length.
    step = N if torch.compiler.is_compiling() else max(1, CHUNK // M)
    for start in [0] if torch.compiler.is_compiling() else range(0, N, step):
        rows = slice(start, start + step)
        logits = query[:, :, rows] @ key.transpose(-1, -2) * call.scale
        shown = visible if visible is None or visible.shape[2] == 1 else visible[:, :, rows]
        if call.bias is not None:
            bias = call.bias[:, :, rows]
            logits, shown = logits + bias, ~bias.isneginf() if shown is None else shown & ~bias.isneginf()
        yield logits, shown
