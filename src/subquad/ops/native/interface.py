"""Calls into the native library: its structures for ctypes, laid out as in `arguments.hpp`, and how a kernel is run."""

import ctypes
from ctypes import POINTER, Structure, byref, c_float, c_int32, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from subquad.ops.native import library
from subquad.ops.transforms import transform

FLOAT32 = torch.empty(0, dtype=torch.float32, device="cpu")
ALIGNMENT = 64  # of the workspace: a cache line
MAX_THREADS = 1024  # as in kernels.cpp
SMALL = 1 << 20  # products that one thread does in some 20 µs
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class Rows(Structure):
    """Rows of contiguous elements, one for each (batch item, head, token)."""

    _fields_ = [("data", c_void_p), ("batch", c_int64), ("head", c_int64), ("token", c_int64)]


class Sizes(Structure):
    """The axes, and how to run."""

    _fields_ = [
        *((axis, c_int64) for axis in ("B", "H", "G", "N", "M", "D", "E", "C", "K", "iterations")),
        ("dtype", c_int32),
        ("threads", c_int32),
    ]


class Saved(Structure):
    """What the forward pass of clustered attention hands to its backward pass."""

    _fields_ = [(name, c_void_p) for name in ("order", "offsets", "top", "centroids", "rest", "lse", "mass")]


class Hashing(Structure):
    """Sign hashes."""

    _fields_ = [
        ("sizes", Sizes),
        ("query", Rows),
        ("query_real", c_void_p),
        ("planes", c_void_p),
        ("bits", c_int64),
        ("centre", c_int64),
        ("codes", c_void_p),
        ("workspace", c_void_p),
    ]


class Clustering(Structure):
    """K-means of codes."""

    _fields_ = [
        ("sizes", Sizes),
        ("codes", c_void_p),
        ("query_real", c_void_p),
        ("labels", c_void_p),
        ("workspace", c_void_p),
    ]


class Forward(Structure):
    """Clustered and improved clustered attention."""

    _fields_ = [
        ("sizes", Sizes),
        *((name, Rows) for name in ("query", "key", "value", "out")),
        ("query_real", c_void_p),
        ("key_real", c_void_p),
        ("planes", c_void_p),
        ("bits", c_int64),
        ("scale", c_float),
        ("saved", Saved),
        ("workspace", c_void_p),
    ]


class Backward(Structure):
    """Their gradients."""

    _fields_ = [
        ("sizes", Sizes),
        *((name, Rows) for name in ("query", "key", "value", "grad_out", "grad_query", "grad_key", "grad_value")),
        ("query_real", c_void_p),
        ("key_real", c_void_p),
        ("scale", c_float),
        ("saved", Saved),
        ("workspace", c_void_p),
    ]


class BucketSet(Structure):
    """A set of buckets."""

    _fields_ = [
        *((name, c_void_p) for name in ("queries", "keys", "bucket")),
        *((axis, c_int64) for axis in ("T", "S", "C", "K", "span", "first")),
    ]


class BucketSets(Structure):
    """Several of them."""

    _fields_ = [("sets", POINTER(BucketSet)), ("count", c_int64)]


class Pattern(Structure):
    """Which keys a query sees by their numbers."""

    _fields_ = [
        *((name, c_int64) for name in ("causal", "other_keys_only", "offset")),
        ("offsets", c_void_p),
        ("hidden", c_void_p),
        ("hidden_rows", c_int64),
    ]


class BucketForward(Structure):
    """Attention inside buckets."""

    _fields_ = [
        ("sizes", Sizes),
        *((name, Rows) for name in ("query", "key", "value", "out")),
        ("key_bias", c_void_p),
        ("buckets", BucketSets),
        ("pattern", Pattern),
        ("scale", c_float),
        ("lse", c_void_p),
        ("workspace", c_void_p),
    ]


class BucketBackward(Structure):
    """Its gradients."""

    _fields_ = [
        ("sizes", Sizes),
        *((name, Rows) for name in ("query", "key", "value", "out", "grad_out")),
        *((name, Rows) for name in ("grad_query", "grad_key", "grad_value")),
        ("key_bias", c_void_p),
        ("buckets", BucketSets),
        ("pattern", Pattern),
        ("scale", c_float),
        *((name, c_void_p) for name in ("lse", "grad_lse", "grad_key_bias", "workspace")),
    ]


class HashLayer(Structure):
    """A layer of a hash function."""

    _fields_ = [("weight", c_void_p), ("bias", c_void_p), ("width_in", c_int64), ("width_out", c_int64)]


class HashTerm(Structure):
    """A hash function of some vectors."""

    _fields_ = [("x", Rows), ("heads", c_int64), ("layers", POINTER(HashLayer)), ("layer_count", c_int64)]


class Selecting(Structure):
    """Balanced selection."""

    _fields_ = [
        ("sizes", Sizes),
        ("scores", Rows),
        ("terms", POINTER(HashTerm)),
        ("term_count", c_int64),
        ("root", c_float),
        *((name, c_void_p) for name in ("real", "wanted")),
        ("odds", c_int64),
        *((name, c_void_p) for name in ("slots", "best", "workspace")),
    ]


class Blocking(Structure):
    """Tokens sorted by label into blocks."""

    _fields_ = [
        ("sizes", Sizes),
        *((name, c_void_p) for name in ("labels", "tokens", "bucket", "used", "workspace")),
    ]


class FeatureInputs(Structure):
    """Queries, keys and values of attention by features."""

    _fields_ = [
        *((name, Rows) for name in ("query", "key", "value")),
        *((name, c_void_p) for name in ("of_query", "of_key", "feature_bias", "key_bias")),
        *((name, c_int64) for name in ("of_query_head", "of_key_head", "feature_bias_head")),
        *((name, c_int64) for name in ("key_bias_batch", "key_bias_head", "block", "lag")),
    ]


class FeatureForward(Structure):
    """Attention by features."""

    _fields_ = [
        ("sizes", Sizes),
        ("inputs", FeatureInputs),
        ("out", Rows),
        *((name, c_void_p) for name in ("lse", "workspace")),
    ]


class FeatureBackward(Structure):
    """Its gradients."""

    _fields_ = [
        ("sizes", Sizes),
        ("inputs", FeatureInputs),
        *((name, Rows) for name in ("out", "grad_out", "grad_query", "grad_key", "grad_value")),
        *((name, c_void_p) for name in ("lse", "grad_lse", "grad_key_bias", "workspace")),
    ]


class CausalProduct(Structure):
    """Causal products."""

    _fields_ = [
        ("sizes", Sizes),
        *((name, Rows) for name in ("query", "key", "value", "out")),
        ("reverse", c_int64),
        ("workspace", c_void_p),
    ]


def refusal(x: Tensor) -> str | None:
    """Why the compiled kernels cannot read this tensor; None where they can."""
    reason = refusal_of_any_dtype(x)
    if reason is None and x.dtype not in DTYPES:
        return f"the dtype is {x.dtype}, and the kernels compute in fp32"
    return reason


def refusal_of_any_dtype(x: Tensor) -> str | None:
    """As `refusal`, for what is no floating-point data."""
    if x.device.type != "cpu":
        return f"the tensors are on {x.device}"
    exporting = torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()
    if exporting and torch.onnx.is_in_onnx_export():
        return "inside torch.onnx.export, and ONNX knows none of the custom ops"
    return transform()


def run(kernel: str, arguments: Structure) -> None:
    """Ask `kernel` how much workspace it needs, get that from torch, and run it.

    Raises:
        ValueError: a list of tokens among the arguments names one that is not there.
    """
    function = getattr(library(), f"subquad_{kernel}")
    # From torch's allocator, so that its profilers see all memory; uninitialised: kernels read only what they wrote.
    workspace = torch.empty(function(byref(arguments)) + ALIGNMENT, dtype=torch.uint8, device="cpu")
    arguments.workspace = -(-workspace.data_ptr() // ALIGNMENT) * ALIGNMENT
    if function(byref(arguments)) < 0:
        raise ValueError(
            f"the kernel {kernel!r} was given lists that do not fit its tensors: pass those that the forward pass made"
        )


def check(op: str, **tensors: tuple[Tensor | None, torch.dtype, tuple[int, ...]]) -> None:
    """Check what kernels rely on: that tensors have the dtype and the shape that go with each other.

    Raises:
        ValueError: an op was called by hand with tensors that do not fit together; says which.
    """
    for name, (x, dtype, shape) in tensors.items():
        if x is not None and (x.dtype != dtype or x.shape != shape):
            have = f"{tuple(x.shape)} of {x.dtype}"
            raise ValueError(f"{op}: `{name}` is {have}, but the other tensors go with {shape} of {dtype}")


def sizes(query: Tensor, key: Tensor, value: Tensor, *, clusters: int, topk: int, iterations: int) -> Sizes:
    """The axes of one attention call, with torch's number of threads."""
    B, H, N, D = query.shape
    _, _, M, E = value.shape
    products = B * H * (clusters * M + N * topk) * (D + E)
    return axes(query, value, clusters, topk, iterations, products)


def axes(query: Tensor, value: Tensor, clusters: int, topk: int, iterations: int, products: int) -> Sizes:
    """The same, with the number of products that the work comes to."""
    B, H, N, D = query.shape
    _, G, M, E = value.shape
    return Sizes(B, H, G, N, M, D, E, clusters, topk, iterations, DTYPES[query.dtype], threads(products))


def threads(products: int) -> int:
    """Torch's number of threads; 1 for so little work that waking the others would take longer than it."""
    return min(torch.get_num_threads(), MAX_THREADS) if products >= SMALL else 1


def rows(x: Tensor) -> Rows:
    """A tensor (B, heads, tokens, width) with contiguous rows."""
    return Rows(x.data_ptr(), *x.stride()[:3])


def with_contiguous_rows(x: Tensor) -> Tensor:
    """The tensor itself where the elements of a row adjoin, else a copy."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def pointer(x: Tensor | None) -> Any:
    """Where a contiguous tensor's elements are; null for None."""
    return None if x is None else ctypes.c_void_p(x.data_ptr())
