"""The contract of NaN and infinity, which every method inherits: docs/how-to/nonfinite.md describes it.

Numbers are poisoned in item 0 and head 0. 70 tokens are more than a tile of any kernel.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import subquad as sq
from subquad import Mask, Method
from subquad.testing.contract import Contract, at_exact_limit, close, has_exact_limit, lengths_to_bool, run, where
from subquad.testing.oracle import gradients, normal, qkv, tracked

N, TOKEN = 70, 23
SIZES = (3, 3), (130, 130), (20, 20), (5, 130), (63, 63), (70, 70)  # on both sides of what SDPA does faster
EVERY = 3  # of the calls is made at each size, and each call at two sizes
HUGE, LARGE = 3e38, 1e20  # the product of two large numbers is infinite, and their sum is not
KINDS = {"nan": torch.nan, "inf": torch.inf, "-inf": -torch.inf, "3e38": HUGE}
Inputs = tuple[Tensor, Tensor, Tensor]

CASES = [(poisoned_at, name) for poisoned_at in ("query", "key", "value") for name in ("nan", "inf", "-inf")]
WHOLE_CASES = [("whole key", "nan"), ("whole key", "-inf"), ("all keys", "nan"), ("all values", "nan")]

on_each_backend = pytest.mark.parametrize("backend", ["reference", "fastest"])


def masks_of(method: Method) -> Iterator[Mask]:
    """No mask, a causal one and padding, if the method supports them."""
    for mask in (Mask(), Mask.causal(), Mask.padding([N, N // 2])):
        if method.refuses(mask) is None:
            yield mask


def on_backend(backend: str, method: Method, inputs: Inputs, **options: object) -> list[Tensor]:
    """The output, and the gradients of query, key and value."""

    def results() -> list[Tensor]:
        leaves = tracked(*inputs)
        out = run(method, *leaves, **options)
        out = out[0] if isinstance(out, tuple) else out
        return [out.detach(), *gradients(out, *leaves)]

    if backend == "fastest":
        return results()
    with sq.use_backend(backend):
        return results()


def poisoned(inputs: Inputs, number: float, poisoned_at: str) -> Inputs:
    """The inputs with this number in one place of item 0 and head 0."""
    q, k, v = (x.clone() for x in inputs)
    match poisoned_at:
        case "query":
            q[0, 0, TOKEN, 1] = number
        case "key":
            k[0, 0, TOKEN, 1] = number
        case "whole key":
            k[0, 0, TOKEN] = number
        case "value":
            v[0, 0, TOKEN, 1] = number
        case "all keys":
            k[0, 0] = number
        case "all values":
            v[0, 0] = number
    return q, k, v


def spoilt(x: Tensor, name: str) -> Tensor:
    """The tensor full of one number, or with another one of each kind for each token and every fifth as it is."""
    if name != "all kinds":
        return torch.full_like(x, float(name))
    numbers = torch.tensor([*KINDS.values(), 0.0])[torch.arange(x.shape[2]) % 5][:, None]
    return torch.where(numbers == 0, x, numbers)


def reads(method: Method, which: int) -> bool:
    """True if the output depends on the queries (0) or keys (1) at all: the keys of some methods are the queries."""
    return bool(on_backend("reference", method, qkv())[1 + which].any())


def runs_on(method: Method, backend: str) -> str:
    """The backend that computes a method; a sum merges its parts in plain PyTorch on every backend."""
    return "reference" if isinstance(method, sq.Sum) else backend


def passes_padding_to_sdpa(method: Method) -> bool:
    """True if the method is SDPA itself, whose padding must be finite."""
    return isinstance(method, sq.Full) and (method.positions, method.kernel) == ("none", "sdpa")


def padded_calls(queries: Tensor, keys: Tensor) -> Iterator[tuple[Mask, dict[str, Any]]]:
    """Masks and options of calls with this padding, (B,N) and (B,M), which decide what computes exact attention."""
    N, M = queries.shape[1], keys.shape[1]
    padding = Mask.padding(keys=keys, queries=queries)
    masks = [padding, padding & Mask.dense(normal(1, 1, N, M, seed=4) > -1)]
    if N == M:
        segments = Mask.segments(torch.where(keys, torch.arange(N) // 9, -1))
        masks += [padding & Mask.causal(), padding & Mask.window(5), padding & Mask.causal() & Mask.window(5), segments]
    options: list[dict[str, Any]] = [{}, {"return_lse": True}, {"dropout_p": 0.3}, {"bias": normal(1, 1, N, M, seed=5)}]
    return product(masks, options)


def same(results: list[Tensor], clean: list[Tensor], part: Callable[[Tensor], Tensor], backend: str) -> bool:
    """Bit for bit on compiled backends. Plain PyTorch has as many blocks for all heads as one of them needs, and a
    product of another shape may be rounded differently, as on processors without AVX-512.
    """
    close = partial(torch.allclose, atol=1e-6, rtol=1e-5) if backend == "reference" else torch.equal
    return all(close(part(x), part(y)) for x, y in zip(results, clean, strict=True))


class NonfiniteContract(Contract):
    """Every promise about numbers that are not finite, one test each."""

    # ------------------------------------------------------------ what they never reach

    @on_each_backend
    @where(lambda traits: not traits.needs_hidden)  # which is the input of all heads
    def test_the_other_items_and_heads_stay_as_they_are(self, method: Method, backend: str):
        first = torch.tensor([[True, False], [False, False]])
        for mask in masks_of(method):
            want = on_backend(backend, method, qkv(N), mask=mask)
            for name in ("nan", "all kinds"):
                dirty = tuple(torch.where(first[..., None, None], spoilt(x, name), x) for x in qkv(N))
                have = on_backend(backend, method, dirty, mask=mask)
                assert same(have, want, lambda x: x[~first], runs_on(method, backend)), f"{mask}, {name}"

    @on_each_backend
    @where(lambda traits: not traits.needs_hidden)
    def test_a_poisoned_query_head_reaches_the_gradients_of_its_key_head_alone(self, method: Method, backend: str):
        clean = qkv(N, H=4, G=2)
        dirty = [x.clone() for x in clean]
        dirty[0][:, 0] = torch.nan
        for mask in masks_of(method):
            want, have = (on_backend(backend, method, inputs, mask=mask, enable_gqa=True) for inputs in (clean, dirty))
            assert same(have[:2], want[:2], lambda x: x[:, 1:], runs_on(method, backend)), str(mask)
            assert same(have[2:], want[2:], lambda x: x[:, 1:], runs_on(method, backend)), str(mask)

    @on_each_backend
    @pytest.mark.parametrize("side", ["left", "right"])
    def test_padding_may_hold_anything(self, method: Method, side: str, backend: str):
        valid = lengths_to_bool([N - 9, N // 2], N, side)
        masks = [Mask.padding(valid), Mask.padding(valid) & Mask.causal()]
        stays = passes_padding_to_sdpa(method)  # in its item
        poison = ~valid & torch.tensor([[True], [not stays]])
        promised = slice(1, None) if stays else slice(None)
        for mask in (mask for mask in masks if method.refuses(mask) is None):
            want = on_backend(backend, method, qkv(N), mask=mask)
            for name in ("nan", f"{LARGE}", "all kinds"):
                dirty = tuple(torch.where(poison[:, None, :, None], spoilt(x, name), x) for x in qkv(N))
                have = on_backend(backend, method, dirty, mask=mask)
                for x, y in zip(have, want, strict=True):
                    close(x[promised], y[promised], msg=lambda m, at=mask, kind=name: f"{at}, {kind}: {m}")
                    assert (x[promised].transpose(1, 2)[~valid[promised]] == 0).all(), f"{mask}, {name}"

    @on_each_backend
    def test_hidden_keys_of_valid_queries_may_hold_anything(self, method: Method, backend: str):
        """In self-attention, also in methods that hash a query and the key at its place as one token."""
        valid = normal(2, N, seed=4) > -0.5
        q, k, v = qkv(N)
        dirty = q, *(x.masked_fill(~valid[:, None, :, None], torch.nan) for x in (k, v))
        masks = (Mask.padding(keys=valid), Mask.padding(keys=valid) & Mask.causal())
        for mask in (mask for mask in masks if method.refuses(mask) is None and not passes_padding_to_sdpa(method)):
            have, want = (on_backend(backend, method, inputs, mask=mask) for inputs in (dirty, (q, k, v)))
            close(have, want, msg=lambda m, at=mask: f"{at}: {m}")

    @where(lambda traits: traits.skips_padding)
    def test_nan_in_padding_is_skipped_on_every_path(self, method: Method):
        """Short inputs may be exact, and what computes exact attention depends on sizes, mask and options."""
        tried = [each for each in {method, type(method)()} if not passes_padding_to_sdpa(each)]
        for at, (N, M) in enumerate(SIZES):
            queries, keys = (lengths_to_bool([n - n // 4, n // 2], n, "left") for n in (N, M))
            valid = [x[:, None, :, None] for x in (queries, keys, keys)]
            inputs = tuple(x.masked_fill(~present, torch.nan) for x, present in zip(qkv(N, M), valid, strict=True))
            calls = list(enumerate(padded_calls(queries, keys)))[at % EVERY :: EVERY]
            for each, (i, (mask, options)) in product(tried, calls):
                asked = {"bias": "bias" in options, "lse": "return_lse" in options, "cross": N != M}
                if each.refuses(mask, **asked) is None:
                    backend = ("fastest", "reference")[(i + at) // EVERY % 2]
                    results = on_backend(backend, each, inputs, mask=mask, **options)
                    assert all(x.isfinite().all() for x in results), f"{each}: {N} × {M}, {mask}, {[*options]}"

    # ------------------------------------------------------------ what they make of an output

    @on_each_backend
    def test_what_depends_on_nan_is_nan(self, method: Method, backend: str):
        spots = ["query"] * reads(method, 0) + ["all values"] + ["all keys"] * reads(method, 1)
        for mask in masks_of(method):
            for poisoned_at in spots:
                out = on_backend(backend, method, poisoned(qkv(N), torch.nan, poisoned_at), mask=mask)[0][0, 0]
                assert out[TOKEN if poisoned_at == "query" else slice(None)].isnan().all(), f"{mask}, {poisoned_at}"

    @on_each_backend
    @where(has_exact_limit)
    def test_the_exact_limit_is_finite_nowhere_that_exact_attention_is_not(self, method: Method, backend: str):
        for poisoned_at, name in CASES:
            q, k, v = poisoned(qkv(N), KINDS[name], poisoned_at)
            out = on_backend(backend, at_exact_limit(method, N, N), (q, k, v))[0]
            exact = (q @ k.mT * 8**-0.5).softmax(-1) @ v
            assert not (out.isfinite() & ~exact.isfinite()).any(), f"{name} in a {poisoned_at}"

    # ------------------------------------------------------------ the same on every backend

    @pytest.mark.parametrize(("poisoned_at", "name"), CASES + WHOLE_CASES)
    def test_every_backend_equals_the_reference(self, method: Method, poisoned_at: str, name: str):
        """Outputs are finite in the same places. Between pairs that a pattern hides from each other, 0·NaN may pass
        gradients of NaN on in the reference, and does not in compiled code.
        """
        inputs = poisoned(qkv(N), KINDS[name], poisoned_at)
        for mask in masks_of(method):
            want, have = (on_backend(backend, method, inputs, mask=mask) for backend in ("reference", "fastest"))
            assert torch.equal(have[0].isfinite(), want[0].isfinite()), str(mask)
            for x, y in zip(have, want, strict=True):
                finite = y.isfinite()
                close(x[finite], y[finite], msg=lambda m, at=mask: f"{at}: {m}")

    def test_a_mean_of_the_largest_numbers_is_finite_where_the_reference_is(self, method: Method):
        inputs = poisoned(qkv(N), HUGE, "all values")
        for mask in masks_of(method):
            want, have = (on_backend(backend, method, inputs, mask=mask)[0] for backend in ("reference", "fastest"))
            finite = want.isfinite()
            torch.testing.assert_close(have[finite], want[finite], rtol=1e-4, atol=1e-5)
            sums_first = type(method).traits.recurrent  # the state that it sums overflows before it is divided
            assert finite[0, 0].any() or not method.traits.normalised or sums_first
