"""The contract of a call: what the traits of a method promise, and that what they deny raises, one test for each.

`Contract` runs each test for each method whose traits it concerns.
"""

import functools
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import Field, fields, replace
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import subquad as sq
from subquad import Mask, Method, Traits
from subquad.kernels.attention.softmax import merge_partials
from subquad.methods import resolve
from subquad.methods.core.plugins import outside_modules
from subquad.testing.oracle import gradients, hidden_for, naive, normal, qkv, tracked

LENGTHS = (24, 1, 17, 0, 3)  # a full item, one token, a prime, none at all, fewer than clusters and top-k
TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 4e-3}

UNUSED = {"allow_unused": True, "materialize_grads": True}  # for inputs that the output does not read

close = functools.partial(torch.testing.assert_close, atol=1e-5, rtol=1e-4)


def where(condition: Callable[[Traits], bool]) -> Callable:
    """Run a test for the methods whose traits satisfy the condition."""

    def mark(test: Callable) -> Callable:
        test.condition = condition
        return test

    return mark


def once(test: Callable) -> Callable:
    """Run a test for the first of each class of methods: for what no setting changes."""
    test.once = True
    return test


def has_exact_limit(traits: Traits) -> bool:
    """True if the method equals exact attention at some settings."""
    return not isinstance(traits.exact_limit, str)


def run(method: Method, *inputs: Tensor, **options: object) -> Tensor:
    """Call a method; one with learned parameters is bound first, with those that it starts with."""
    if not method.traits.learned:
        return method(*inputs, **options)
    options.pop("enable_gqa", None)
    return bound_for(method, *inputs)(*inputs, **hidden_for(method, inputs[0]), **options)


def bound_for(method: Method, query: Tensor, key: Tensor, value: Tensor) -> sq.BoundMethod:
    """The method bound for the heads, width and lengths of these inputs, or for longer ones."""
    longest = max(64, query.shape[2], key.shape[2])
    sizes = {"heads": query.shape[1] or 2, "kv_heads": key.shape[1] or 2, "head_dim": query.shape[3] or 1}
    return method.bind(**sizes, max_length=longest).eval()


def run_with_parameters_of(method: Method, grouped: Sequence[Tensor], repeated: Sequence[Tensor]) -> Tensor:
    """Run on repeated key heads, which have the parameters of the head that they repeat."""
    if not method.traits.learned:
        return run(method, *repeated)
    few, many = bound_for(method, *grouped), bound_for(method, *repeated)
    for wanted, parameter in zip(few.parameters(), many.parameters(), strict=True):
        times = len(parameter) // len(wanted)
        parameter.data = wanted.data.repeat_interleave(times, dim=0)
    return many(*repeated, **hidden_for(method, repeated[0]))


def another_value(method: Method, setting: Field) -> object:
    """A value that this setting does not have."""
    have = getattr(method, setting.name)
    choices = setting.metadata.get("choices") or setting.metadata.get("examples")
    return next(choice for choice in choices if choice != have) if choices else have + 1


def changed(method: Method, setting: Field) -> Method | None:
    """The method with another value of this setting; None if another setting excludes it with an error."""
    try:
        return replace(method, **{setting.name: another_value(method, setting)})
    except ValueError as refusal:
        if f"{setting.name}=" in str(refusal) and " needs " in str(refusal):
            return None
        raise


def at_exact_limit(method: Method, N: int, M: int) -> Method:
    """The method with the settings at which it equals exact attention to M keys."""
    sizes = {"N": N, "M": M}
    return replace(method, **{name: sizes.get(value, value) for name, value in method.traits.exact_limit.items()})


def lengths_to_bool(lengths: Sequence[int], width: int, side: str) -> Tensor:
    """The real tokens of items of these lengths, (B,width), which are padded on the other side of `side`."""
    valid = torch.arange(width) < torch.tensor(lengths)[:, None]
    return valid if side == "right" else valid.flip(1)


def sizes_of_one(method: Method) -> list[tuple[int, int, int]]:
    """Query heads, key heads and tokens, of which some are one; mixed heads have two at least."""
    if len(method.parts) > 1:
        return [(2, 2, 1)]
    return [(1, 1, 24), (2, 1, 24), (2, 2, 1), (1, 1, 1), (2, 1, 1)]


def pad(items: list[tuple[Tensor, ...]], valid: Tensor, filler: float) -> list[Tensor]:
    """Put the first tokens of each item, (1,H,n,·), where its row is real, and noise of size `filler` elsewhere."""
    batch = []
    for i, parts in enumerate(zip(*items, strict=True)):
        _, H, _, width = parts[0].shape
        x = filler * normal(len(items), H, valid.shape[1], width, seed=50 + i, dtype=parts[0].dtype)
        for row, part in enumerate(parts):
            x[row][:, valid[row]] = part[0, :, : int(valid[row].sum())]
        batch.append(x)
    return batch


def supported_masks(method: Method, B: int, N: int) -> list[Mask]:
    """One mask of each kind, and mixtures, out of those that the method supports."""
    keys = lengths_to_bool([N - 3, N // 2][:B], N, "left")
    ids = torch.arange(N).expand(B, N) % 4 - 1
    dense = normal(B, 1, N, N, seed=4) > 0
    simple = [Mask(), Mask.padding(keys), Mask.causal(), Mask.window(3), Mask.segments(ids), Mask.dense(dense)]
    mixed = [
        Mask.padding(keys=keys),
        Mask.padding(keys=keys, queries=[N, 5]),
        Mask.causal() & Mask.padding(keys),
        Mask.causal() & Mask.window(3) & Mask.padding(keys=keys),
        Mask.segments(ids) & Mask.padding(keys=keys),
        Mask.segments(ids) & Mask.causal(),
        Mask.segments(torch.arange(N).expand(B, N) // 5 - 1) & Mask.causal(offset=2),
        Mask.dense(dense) & Mask.padding(keys),
    ]
    return [mask for mask in simple + mixed if method.refuses(mask) is None]


def compile_failures(methods: Sequence[Method]) -> dict[str, str]:
    """The failures of methods that are compiled, from one process for all of them."""
    task = {"modules": outside_modules(), "methods": [method.to_dict() for method in methods]}
    done = subprocess.run(
        [sys.executable, "-m", "subquad.testing.compiled"],
        input=json.dumps(task),
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert done.returncode == 0, done.stderr
    failures = zip(methods, json.loads(done.stdout), strict=True)
    return {str(method): failure for method, failure in failures if failure is not None}


def run_per_segment(method: Method, q: Tensor, k: Tensor, v: Tensor, ids: Tensor, valid: Tensor) -> Tensor:
    """Each segment alone, one call each: what a packed call must equal."""
    out = torch.zeros(*q.shape[:3], v.shape[3])
    for item, number in {(b, int(n)) for b in range(len(ids)) for n in ids[b] if n >= 0}:
        here = ids[item] == number
        parts = (x[item : item + 1, :, here] for x in (q, k, v))
        out[item][:, here] = run(method, *parts, mask=Mask.padding(keys=valid[item : item + 1, here]))[0]
    return out


class Contract:
    """Runs each test of a subclass for the methods whose traits it concerns: `method`, or several `methods`."""

    method: ClassVar[Method | str | None] = None
    methods: ClassVar[Sequence[Method | str]] = ()
    compiled_in_steps_of: ClassVar[Sequence[Any]] = (1,)  # n: a test compiles every n-th method

    @classmethod
    def all_methods(cls) -> list[Method]:
        """The methods under test. TypeError if the class names none."""
        chosen = [*cls.methods, *([] if cls.method is None else [cls.method])]
        if not chosen:
            raise TypeError(
                f"{cls.__name__} tests no method: write `method = Mine()` or `methods = [...]` in the class"
            )
        return [resolve(method) for method in chosen]

    def is_long(self, test: str, method: Method) -> bool:
        """True if the case of this method is marked `long`, in a test suite that has such a mark."""
        return False

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Parametrise a test by the methods that it concerns."""
        if "every" in metafunc.fixturenames:
            metafunc.parametrize("every", self.compiled_in_steps_of)
        if "method" not in metafunc.fixturenames:
            return
        condition = getattr(metafunc.function, "condition", lambda traits: True)
        concerned = [method for method in self.all_methods() if condition(method.traits)]
        if getattr(metafunc.function, "once", False):
            concerned = list({type(method): method for method in reversed(concerned)}.values())[::-1]
        name = metafunc.function.__name__
        cases = [
            pytest.param(m, id=str(m), marks=[pytest.mark.long] if self.is_long(name, m) else []) for m in concerned
        ]
        metafunc.parametrize("method", cases)


class CallContract(Contract):
    """Every promise of a method about calls, one test each."""

    # ------------------------------------------------------------ exactness

    @where(has_exact_limit)
    def test_exact_limit_equals_naive_softmax(self, method: Method):
        q, k, v = qkv()
        torch.testing.assert_close(run(at_exact_limit(method, 24, 24), q, k, v), naive(q, k, v), atol=1e-5, rtol=0)

    @where(has_exact_limit)
    def test_exact_limit_under_every_mask_that_it_takes(self, method: Method):
        q, k, v = qkv(13)
        exact = at_exact_limit(method, 13, 13)
        for mask in supported_masks(method, 2, 13):
            close(
                run(exact, q, k, v, mask=mask),
                naive(q, k, v, mask.to_dense(13, 13)),
                msg=lambda m, at=mask: f"{at}: {m}",
            )

    @where(lambda traits: has_exact_limit(traits) and traits.bias)
    def test_bias_is_added_to_the_logits(self, method: Method):
        q, k, v = qkv(13)
        exact = at_exact_limit(method, 13, 13)
        for bias in (normal(2, 2, 13, 13, seed=8), normal(1, 2, 13, 13, seed=8), normal(1, 1, 13, 13, seed=8)):
            for mask in supported_masks(method, 2, 13):
                close(run(exact, q, k, v, bias=bias, mask=mask), naive(q, k, v, mask.to_dense(13, 13), bias))

    @where(lambda traits: traits.bias)
    def test_bias_has_a_gradient(self, method: Method):
        (bias,) = tracked(normal(1, 2, 24, 24, seed=8))
        assert gradients(run(method, *qkv(), bias=bias), bias)[0].abs().max() > 0

    @where(lambda traits: not has_exact_limit(traits))
    def test_without_exact_limit_the_reason_is_stated_and_it_is_not_exact(self, method: Method):
        q, k, v = qkv()
        assert len(method.traits.exact_limit) > 20
        assert (run(method, q, k, v) - naive(q, k, v)).abs().max() > 1e-3

    @where(lambda traits: traits.unit == "both")
    def test_lengths_of_queries_and_keys_do_not_matter(self, method: Method):
        q, k, v = qkv()
        close(run(method, 2 * q, 3 * k, v), run(method, q, k, v))
        assert not torch.allclose(run(method, q, k, v, scale=0.1), run(method, q, k, v), atol=1e-3)

    @where(lambda traits: not traits.relative and not traits.synthetic and traits.unit != "both")
    def test_scale_multiplies_the_products(self, method: Method):
        q, k, v = qkv()
        grown = {"keys": 2, "none": 4}[method.traits.unit] * 8**-0.5
        torch.testing.assert_close(run(method, q, k, v, scale=grown), run(method, 2 * q, 2 * k, v))
        assert not torch.allclose(run(method, q, k, v, scale=0.1), run(method, q, k, v), atol=1e-3)

    @where(lambda traits: traits.synthetic)
    def test_scale_multiplies_all_logits(self, method: Method):
        q, k, v = qkv()
        close(run(method, q, k, v, scale=0.0), v.mean(2, keepdim=True).expand_as(v))
        assert not torch.allclose(run(method, q, k, v, scale=0.1), run(method, q, k, v), atol=1e-3)

    @where(lambda traits: traits.relative and not traits.synthetic)
    def test_scale_multiplies_more_than_the_products(self, method: Method):
        q, k, v = qkv()
        doubled = run(method, 2 * q, 2 * k, v)
        assert not torch.allclose(run(method, q, k, v, scale=4 * 8**-0.5), doubled, atol=1e-4)
        assert not torch.allclose(run(method, q, k, v, scale=0.1), run(method, q, k, v), atol=1e-3)

    @where(lambda traits: traits.relative)
    def test_terms_of_the_distance_tell_equal_keys_apart(self, method: Method):
        q, k, v = qkv()
        same = k[:, :, :1].expand_as(k)
        assert not torch.allclose(run(method, q, same, v), run(method, 0 * q, same, v), atol=1e-4)

    @where(has_exact_limit)
    def test_scale_as_in_naive_softmax(self, method: Method):
        q, k, v = qkv()
        close(run(at_exact_limit(method, 24, 24), q, k, v, scale=0.9), naive(q, k, v, scale=0.9))

    # ------------------------------------------------------------ padding

    @pytest.mark.parametrize(("side", "scale"), [("left", 1.0), ("right", 1.0), ("left", 3000.0)])
    def test_padding_changes_no_output(self, method: Method, side: str, scale: float):
        # At scale 3000 the weights of most keys underflow to 0: as small as those of pads.
        made = (qkv(max(n, 1), B=1, seed=i, dtype=torch.float64) for i, n in enumerate(LENGTHS))
        items = [(scale * q, k, v) for q, k, v in made]
        alone = [run(method, *item)[0] for item in items]
        for width, filler in ((24, 1.0), (24, 300.0), (39, 30.0)):
            valid = lengths_to_bool(LENGTHS, width, side)
            out = run(method, *pad(items, valid, filler), mask=Mask.padding(valid))
            assert (out.transpose(1, 2)[~valid] == 0).all()
            for row, n in enumerate(LENGTHS):
                if n:
                    close(out[row][:, valid[row]], alone[row])

    @pytest.mark.parametrize("side", ["left", "right"])
    def test_padding_changes_no_gradient_and_gets_none(self, method: Method, side: str):
        items = [qkv(max(n, 1), B=1, seed=i) for i, n in enumerate(LENGTHS)]
        alone = []
        for item in items:
            inputs = tracked(*item)
            alone.append(torch.autograd.grad(run(method, *inputs).square().sum(), inputs, allow_unused=True))
        for width, filler in ((24, 300.0), (39, 1.0)):
            valid = lengths_to_bool(LENGTHS, width, side)
            batch = tracked(*pad(items, valid, filler))
            grads = torch.autograd.grad(
                run(method, *batch, mask=Mask.padding(valid)).square().sum(), batch, allow_unused=True
            )
            for i, grad in enumerate(g for g in grads if g is not None):
                assert (grad.transpose(1, 2)[~valid] == 0).all(), f"input {i}"
            for row in (r for r, n in enumerate(LENGTHS) if n):
                for grad, want in zip(grads, alone[row], strict=True):
                    assert (grad is None) == (want is None)
                    if grad is not None:
                        close(grad[row][:, valid[row]], want[0])

    def test_lengths_equal_the_bool_that_they_stand_for(self, method: Method):
        q, k, v = qkv()
        as_bool = run(method, q, k, v, mask=Mask.padding(lengths_to_bool([24, 7], 24, "right")))
        assert torch.equal(run(method, q, k, v, mask=Mask.padding([24, 7])), as_bool)

    @where(lambda traits: traits.cross)
    def test_cross_padding_of_either_side(self, method: Method):
        q, k, v = qkv(11, 19)
        out = run(method, q, k, v, mask=Mask.padding(keys=[19, 6], queries=[4, 11]))
        close(out[:1, :, :4], run(method, q[:1, :, :4], k[:1], v[:1]))
        close(out[1:], run(method, q[1:], k[1:, :, :6], v[1:, :, :6]))
        assert (out[0, :, 4:] == 0).all()

    def test_a_query_that_sees_no_key_is_zero_with_zero_gradient(self, method: Method):
        inputs = tracked(*qkv())
        out = run(method, *inputs, mask=Mask.padding(keys=[24, 0]))
        assert (out[1] == 0).all()
        assert (out[0] != 0).any()
        for grad in gradients(out, *inputs):
            assert grad.isfinite().all()
            assert (grad[1] == 0).all()

    @where(lambda traits: traits.dense_mask)
    def test_a_dense_mask_can_hide_a_whole_row(self, method: Method):
        allowed = torch.ones(1, 1, 24, 24, dtype=torch.bool)
        allowed[..., 5, :] = False
        inputs = tracked(*qkv())
        out = run(method, *inputs, mask=Mask.dense(allowed))
        assert (out[:, :, 5] == 0).all()
        assert (out[:, :, 6] != 0).all()
        assert all(grad.isfinite().all() for grad in gradients(out, *inputs))

    # ------------------------------------------------------------ order

    @where(lambda traits: traits.cross and not traits.positional)
    def test_the_order_of_the_keys_does_not_matter(self, method: Method):
        q, k, v = qkv(11, 19)
        order = normal(19, seed=5).argsort()
        close(run(method, q, k[:, :, order], v[:, :, order]), run(method, q, k, v))

    @where(lambda traits: traits.order_free and not traits.positional)
    def test_permuted_tokens_give_permuted_outputs(self, method: Method):
        q, k, v = qkv()
        order = normal(24, seed=5).argsort()
        close(run(method, *(x[:, :, order] for x in (q, k, v))), run(method, q, k, v)[:, :, order])

    @where(lambda traits: traits.order_free and traits.cross)
    def test_permuted_queries_give_permuted_outputs(self, method: Method):
        q, k, v = qkv(11, 19)
        order = normal(11, seed=5).argsort()
        close(run(method, q[:, :, order], k, v), run(method, q, k, v)[:, :, order])

    @where(lambda traits: not traits.order_free)
    def test_what_is_not_order_free_depends_on_order(self, method: Method):
        q, k, v = qkv()
        order = normal(24, seed=5).argsort()
        assert not torch.allclose(run(method, q[:, :, order], k, v), run(method, q, k, v)[:, :, order], atol=1e-3)

    # ------------------------------------------------------------ causality

    @where(lambda traits: traits.causal == "strict")
    def test_the_future_changes_no_output(self, method: Method):
        now, later = qkv(), qkv(seed=9)
        changed = [torch.cat([a[:, :, :15], b[:, :, 15:]], dim=2) for a, b in zip(now, later, strict=True)]
        out, other = run(method, *now, is_causal=True), run(method, *changed, is_causal=True)
        close(out[:, :, :15], other[:, :, :15])
        assert not torch.allclose(out[:, :, 15:], other[:, :, 15:])

    @where(lambda traits: traits.causal == "strict")
    def test_a_prefix_alone_equals_the_prefix_of_the_whole(self, method: Method):
        q, k, v = qkv()
        whole = run(method, q, k, v, mask=Mask.causal())
        for t in (1, 2, 13, 23):
            close(run(method, *(x[:, :, :t] for x in (q, k, v)), mask=Mask.causal()), whole[:, :, :t])

    @where(lambda traits: traits.causal != "no")
    def test_no_gradient_flows_into_the_past_from_the_future(self, method: Method):
        inputs = tracked(*qkv())
        of_inputs = gradients(run(method, *inputs, is_causal=True)[:, :, :15], *inputs)
        for grad in of_inputs[1:] if method.traits.leaks_in_training else of_inputs:  # queries share centroids
            assert (grad[:, :, 15:] == 0).all()

    @where(lambda traits: traits.causal == "values-only")
    def test_future_values_change_no_output(self, method: Method):
        q, k, v = qkv()
        changed = torch.cat([v[:, :, :15], 5 + v[:, :, 15:]], dim=2)
        close(run(method, q, k, changed, is_causal=True)[:, :, :15], run(method, q, k, v, is_causal=True)[:, :, :15])

    @where(lambda traits: traits.causal == "no")
    def test_causal_masks_are_refused_with_the_reason(self, method: Method):
        for options in ({"is_causal": True}, {"mask": Mask.causal()}, {"mask": Mask.causal(offset=3)}):
            with pytest.raises(
                ValueError,
                match=rf"'{re.escape(method.label)}' does not support a causal mask.*future.*'full'.*'local'",
            ):
                run(method, *qkv(), **options)

    @where(lambda traits: traits.causal == "strict" and (traits.cross or traits.cached) and not traits.by_halves)
    def test_a_cached_step_equals_the_row_of_the_whole(self, method: Method):
        q, k, v = qkv()
        whole = run(method, q, k, v, is_causal=True)
        for t in (1, 7, 24):
            step = run(method, q[:, :, t - 1 : t], k[:, :, :t], v[:, :, :t], mask=Mask.causal(offset=t - 1))
            close(step, whole[:, :, t - 1 : t])

    @where(lambda traits: traits.causal == "strict" and (traits.cross or traits.cached) and not traits.by_halves)
    def test_a_step_on_a_static_cache_equals_the_row_of_the_whole(self, method: Method):
        q, k, v = qkv()
        whole = run(method, q, k, v, is_causal=True)
        at = torch.tensor([6, 20])
        query = torch.stack([q[0, :, 6:7], q[1, :, 20:21]])
        step = run(method, query, k, v, mask=Mask.causal(offset=at))
        close(step, torch.stack([whole[0, :, 6:7], whole[1, :, 20:21]]))

    # ------------------------------------------------------------ shapes

    def test_batch_items_are_independent(self, method: Method):
        q, k, v = qkv()
        out = run(method, q, k, v)
        for item in (0, 1):
            close(run(method, *(x[item : item + 1] for x in (q, k, v))), out[item : item + 1])

    def test_sizes_of_one_are_not_what_items_share(self, method: Method):
        """Each item gives what it gives alone, and a NaN in one stays there, whatever other sizes are one."""
        for H, G, N in sizes_of_one(method):
            q, k, v = qkv(N, H=H, G=G, E=8)
            alone = []
            for item in (0, 1):
                inputs = tracked(*(x[item : item + 1] for x in (q, k, v)))
                out = run(method, *inputs, enable_gqa=True)
                alone.append([out, *torch.autograd.grad((out * normal(*out.shape, seed=9)).sum(), inputs, **UNUSED)])
            inputs = tracked(q, k, v)
            out = run(method, *inputs, enable_gqa=True)
            loss = normal(1, *out.shape[1:], seed=9)
            together = [out, *torch.autograd.grad((out * loss).sum(), inputs, **UNUSED)]
            for item in (0, 1):
                close([x[item : item + 1] for x in together], alone[item], msg=lambda m, at=(H, G, N): f"{at}: {m}")
            poisoned = tracked(*(torch.cat([x[:1] * math.nan, x[1:]]) for x in (q, k, v)))
            out = run(method, *poisoned, enable_gqa=True)
            spoilt = [out, *torch.autograd.grad((out * loss).sum(), poisoned, **UNUSED)]
            close([x[1:] for x in spoilt], alone[1], msg=lambda m, at=(H, G, N): f"NaN, {at}: {m}")

    def test_shared_key_heads_equal_repeated_ones(self, method: Method):
        q, k, v = tracked(*qkv(H=4, G=2))
        repeated = tracked(q, k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1))
        out, wanted = run(method, q, k, v, enable_gqa=True), run_with_parameters_of(method, (q, k, v), repeated)
        close(out, wanted)
        grads, wanted_grads = gradients(out, q, k, v), gradients(wanted, *repeated)
        close(grads, [wanted_grads[0], *(g.unflatten(1, (2, 2)).sum(2) for g in wanted_grads[1:])])

    @where(lambda traits: traits.cross)
    def test_more_and_fewer_keys_than_queries(self, method: Method):
        for N, M in ((24, 3), (3, 24), (1, 24), (24, 1)):
            q, k, v = qkv(N, M)
            out = run(method, q, k, v)
            assert out.shape == (2, 2, N, 6)
            if has_exact_limit(method.traits):
                close(run(at_exact_limit(method, N, M), q, k, v), naive(q, k, v))

    @pytest.mark.parametrize("N", [1, 2, 3, 7, 31, 33])
    def test_odd_and_prime_lengths(self, method: Method, N: int):
        inputs = tracked(*qkv(N))
        out = run(method, *inputs)
        assert out.shape == (2, 2, N, 6)
        assert out.isfinite().all()
        assert all(grad.isfinite().all() for grad in gradients(out, *inputs))

    @where(lambda traits: traits.normalised)
    def test_one_token_sees_itself(self, method: Method):
        q, k, v = qkv(1)
        close(run(method, q, k, v), v)

    @where(lambda traits: traits.normalised)
    def test_equal_values_come_through(self, method: Method):
        q, k, _ = qkv()
        v = normal(2, 2, 1, 6).expand(2, 2, 24, 6)
        close(run(method, q, k, v), v)

    @where(lambda traits: not traits.normalised)
    def test_equal_values_need_not_come_through(self, method: Method):
        q, k, _ = qkv()
        v = normal(2, 2, 1, 6).expand(2, 2, 24, 6)
        bound = bound_for(method, q, k, v)
        for parameter in bound.parameters():  # those at the start may be means
            parameter.data += 0.1 * normal(*parameter.shape, seed=3)
        assert (bound(q, k, v) - v).abs().max() > 1e-2

    @once
    @pytest.mark.parametrize(("axis", "what"), [(0, "batch"), (1, "heads"), (2, "positions"), (3, "width")])
    def test_empty_inputs_are_refused(self, method: Method, axis: int, what: str):
        q, k, v = (x.narrow(axis, 0, 0) for x in qkv())
        with pytest.raises(ValueError, match=f"is empty: its {what}"):
            run(method, q, k, v)

    @pytest.mark.parametrize("E", [1, 8, 11])
    def test_any_value_width(self, method: Method, E: int):
        q, k, v = qkv(E=11)
        if method.traits.by_values:  # other values are another choice: but numbers that are all 0 add nothing to it
            others = torch.zeros_like(v[..., E:])
            wanted = run(method, q, k, torch.cat([v[..., :E], others], dim=-1))
            assert wanted.shape[3] == 11
            assert not wanted[..., E:].any()
            assert torch.isfinite(run(method, q, k, v[..., :E])).all()
        else:
            close(run(method, q, k, v[..., :E]), run(method, q, k, v)[..., :E])

    @where(lambda traits: traits.by_values)
    def test_choices_by_values_are_of_the_values(self, method: Method):
        """Else the trait is not true: with other values the outputs are those of other weights."""
        q, k, v = qkv(40, 40)
        doubled = torch.cat([v, normal(*v.shape, seed=9)], dim=-1)
        assert not torch.allclose(run(method, q, k, doubled)[..., : v.shape[3]], run(method, q, k, v), atol=1e-4)

    def test_strided_inputs_equal_contiguous_ones(self, method: Method):
        heads_last = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv()]
        assert not heads_last[0].is_contiguous()
        close(run(method, *heads_last), run(method, *qkv()))

    def test_expanded_inputs_equal_copies(self, method: Method):
        expanded = [x[:1, :1].expand(2, 2, -1, -1) for x in qkv()]
        close(run(method, *expanded), run(method, *(x.contiguous() for x in expanded)))

    def test_overlapping_inputs_equal_copies(self, method: Method):
        """Windows of one tensor, whose entries share memory."""
        for N in (24, 70):
            B, H, D, step = 2, 2, 8, 2
            strides = (1, step * N + D - 3, step, 1)
            overlapping = [
                normal(B + H * strides[1] + N * step + D, seed=i).as_strided((B, H, N, D), strides) for i in range(3)
            ]
            for mask in (Mask(), Mask.padding([N, N // 2]), Mask.causal()):
                if method.refuses(mask) is None:
                    want = run(method, *(x.contiguous() for x in overlapping), mask=mask)
                    close(run(method, *overlapping, mask=mask), want)

    def test_inputs_are_left_as_they_are(self, method: Method):
        inputs, before = qkv(), qkv()
        run(method, *inputs)
        assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))

    # ------------------------------------------------------------ segments

    @pytest.mark.parametrize("layout", ["contiguous", "interleaved"])
    def test_packed_segments_equal_each_alone(self, method: Method, layout: str):
        numbers = torch.tensor([7] * 9 + [-1] * 3 + [0] * 1 + [3] * 11)  # not in order, one of a single token
        ids = torch.stack([numbers, numbers.flip(0)])
        ids = ids if layout == "contiguous" else ids[:, normal(24, seed=5).argsort()]
        q, k, v = qkv()
        alone = run_per_segment(method, q, k, v, ids, valid=ids >= 0)
        close(run(method, q, k, v, mask=Mask.segments(ids)), alone)

    def test_packed_segments_with_hidden_keys(self, method: Method):
        ids = torch.arange(24).expand(2, 24) % 4 - 1
        valid = lengths_to_bool([20, 13], 24, "right")
        q, k, v = qkv()
        out = run(method, q, k, v, mask=Mask.segments(ids) & Mask.padding(keys=valid))
        close(out, run_per_segment(method, q, k, v, ids, valid))

    def test_segments_that_are_all_padding_give_zero(self, method: Method):
        q, k, v = qkv()
        assert (run(method, q, k, v, mask=Mask.segments(torch.full((2, 24), -1))) == 0).all()

    # ------------------------------------------------------------ patterns

    @where(lambda traits: traits.window)
    def test_tokens_outside_the_window_do_not_matter(self, method: Method):
        inputs = tracked(*qkv())
        for grad in gradients(run(method, *inputs, mask=Mask.window(2))[:, :, 10:11], *inputs):
            assert (grad[:, :, :8] == 0).all()
            assert (grad[:, :, 13:] == 0).all()

    @where(lambda traits: traits.window and traits.dense_mask)
    def test_a_window_equals_the_dense_mask_of_its_shape(self, method: Method):
        q, k, v = qkv()
        dense = Mask.dense(Mask.window(3).to_dense(24, 24))
        close(run(method, q, k, v, mask=Mask.window(3)), run(method, q, k, v, mask=dense))

    @where(lambda traits: traits.bias and traits.dense_mask)
    def test_a_bias_of_minus_infinity_hides_as_a_dense_mask_does(self, method: Method):
        """A query from which it hides all keys has output 0."""
        allowed = normal(2, 1, 24, 24, seed=4) > -0.5
        allowed[0, :, 5] = False
        hiding = {"bias": torch.zeros(2, 1, 24, 24).masked_fill(~allowed, -torch.inf)}, {"mask": Mask.dense(allowed)}
        for options in ({}, {"return_lse": True}, {"keep": [0, 3]}):
            if method.refuses(Mask(), lse="return_lse" in options, keep="keep" in options) is None:
                results = []
                for hides in hiding:
                    inputs = tracked(*qkv())
                    out = run(method, *inputs, **options, **hides)
                    out, *lse = out if isinstance(out, tuple) else (out,)
                    results.append([out, *lse, *gradients(out, *inputs)])
                close(*results)
                assert (results[0][0][0, :, 5] == 0).all()

    @where(lambda traits: traits.bias and traits.dense_mask)
    def test_a_huge_negative_bias_equals_a_dense_mask(self, method: Method):
        q, k, v = qkv()
        allowed = normal(2, 2, 24, 24, seed=4) > -0.5
        bias = torch.zeros(2, 2, 24, 24).masked_fill(~allowed, -1e9)
        close(run(method, q, k, v, bias=bias), run(method, q, k, v, mask=Mask.dense(allowed)))

    # ------------------------------------------------------------ numbers

    def test_gradients_in_fp64(self, method: Method):
        inputs = tracked(*qkv(7, B=1, D=3, E=2, dtype=torch.float64))
        read = [grad.abs().max() > 0 for grad in gradients(run(method, *inputs), *inputs)]
        assert read[2]
        for mask in (None, Mask.padding([6])):
            assert torch.autograd.gradcheck(
                lambda q, k, v, m=mask: run(method, q, k, v, mask=m), inputs, fast_mode=True
            )

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_half_precision_against_fp64(self, method: Method, dtype: torch.dtype):
        rounded = [x.to(dtype) for x in qkv()]
        out, exact = run(method, *rounded), run(method, *(x.double() for x in rounded))
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), exact, atol=TOLERANCE[dtype], rtol=0)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
    def test_dtype_in_is_dtype_out(self, method: Method, dtype: torch.dtype):
        out = run(method, *qkv(dtype=dtype))
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), run(method, *qkv(dtype=torch.float64)), atol=1e-5, rtol=1e-5)

    @once
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
    def test_autocast_gives_the_dtype_of_sdpa(self, method: Method, dtype: torch.dtype):
        q, k, v = qkv(dtype=dtype)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = run(method, q, k, v)
            assert out.dtype == F.scaled_dot_product_attention(q, k, v).dtype
        torch.testing.assert_close(out, run(method, *(x.to(out.dtype) for x in (q, k, v))))

    @once
    def test_autocast_takes_mixed_dtypes_as_sdpa_does(self, method: Method):
        q, k, v = qkv()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            close(run(method, q, k, v.bfloat16()), run(method, q, k, v))

    # ------------------------------------------------------------ randomness

    def test_same_seed_same_output_and_the_global_generator_untouched(self, method: Method):
        inputs = qkv()
        torch.manual_seed(1)
        state, first = torch.get_rng_state(), run(method, *inputs, seed=5)
        assert torch.equal(torch.get_rng_state(), state)
        torch.manual_seed(2)
        assert torch.equal(run(method, *inputs, seed=5), first)

    @where(lambda traits: traits.stochastic)
    def test_another_seed_gives_another_output(self, method: Method):
        outs = [run(method, *qkv(), seed=seed) for seed in (0, 1)]
        assert not torch.allclose(*outs, atol=1e-4)
        # The seed of a learned method is that of its parameters' start as well; that of mixed heads is their methods'.
        if not method.traits.learned and hasattr(method, "seed"):
            assert torch.equal(outs[1], run(replace(method, seed=1), *qkv()))

    @where(lambda traits: not traits.stochastic)
    def test_the_seed_of_a_method_without_randomness_changes_nothing(self, method: Method):
        assert torch.equal(run(method, *qkv(), seed=0), run(method, *qkv(), seed=1))
        # A seed may be that of the parameters' start, also where some settings leave no parameters.
        assert type(method).traits.learned or not hasattr(method, "seed")

    def test_dropout_drops_and_keeps_the_mean(self, method: Method):
        q, k, v = (x.expand(600, -1, -1, -1) for x in qkv(6, B=1, D=4, E=2))
        torch.manual_seed(0)
        out = run(method, q, k, v, dropout_p=0.3)
        assert out.std(0).min() > 0.02
        torch.testing.assert_close(out.mean(0), run(method, q[:1], k[:1], v[:1])[0], atol=0.13, rtol=0)

    @once
    @pytest.mark.parametrize("dropout_p", [-0.1, 1.0])
    def test_impossible_dropout_is_refused(self, method: Method, dropout_p: float):
        with pytest.raises(ValueError, match=r"dropout_p=.* must be in \[0, 1\)"):
            run(method, *qkv(), dropout_p=dropout_p)

    # ------------------------------------------------------------ composition

    @where(lambda traits: has_exact_limit(traits) and traits.lse)
    def test_the_log_sum_exp_at_the_exact_limit_is_that_of_the_logits(self, method: Method):
        q, k, v = qkv(13)
        exact, times = at_exact_limit(method, 13, 13), method.traits.multiplicity
        more = math.log(getattr(method, times) if isinstance(times, str) else times)
        for mask in supported_masks(method, 2, 13):
            out, lse = run(exact, q, k, v, mask=mask, return_lse=True)
            allowed = mask.to_dense(13, 13)
            close(
                lse - more,
                (q @ k.mT * 8**-0.5).masked_fill(~allowed, -torch.inf).logsumexp(-1),
                msg=lambda m, at=mask: f"{at}: {m}",
            )
            close(out, run(exact, q, k, v, mask=mask))

    @where(lambda traits: has_exact_limit(traits) and traits.lse)
    def test_partials_of_two_halves_of_the_keys_merge_to_the_whole(self, method: Method):
        q, k, v = qkv(19)
        exact = at_exact_limit(method, 19, 19)
        valid = lengths_to_bool([19, 5], 19, "right")  # the second item sees nothing of the second half
        half = lengths_to_bool([8, 8], 19, "right")
        parts = [
            run(exact, q, k, v, mask=Mask.padding(keys=valid & of_half), return_lse=True) for of_half in (half, ~half)
        ]
        whole = run(exact, q, k, v, mask=Mask.padding(keys=valid), return_lse=True)
        for merged, want in zip(merge_partials(parts), whole, strict=True):
            close(merged, want)

    @where(lambda traits: traits.lse)
    def test_the_log_sum_exp_comes_with_the_same_output(self, method: Method):
        q, k, v = qkv()
        mask = Mask.padding(keys=[24, 0], queries=[20, 24])
        out, lse = run(method, q, k, v, mask=mask, return_lse=True)
        close(out, run(method, q, k, v, mask=mask))
        assert (lse.shape, lse.dtype) == (q.shape[:3], torch.float32)
        visible = torch.arange(24) < torch.tensor([20, 0])[:, None]
        assert (lse.isfinite() == visible[:, None]).all()
        assert lse[~visible[:, None].expand_as(lse)].isneginf().all()
        halves = run(method, *(x.bfloat16() for x in (q, k, v)), mask=mask, return_lse=True)
        assert (halves[0].dtype, halves[1].dtype) == (torch.bfloat16, torch.float32)

    @where(lambda traits: traits.lse)
    def test_the_gradient_of_the_log_sum_exp_in_fp64(self, method: Method):
        inputs = tracked(*qkv(7, B=1, D=3, E=2, dtype=torch.float64))
        assert torch.autograd.gradcheck(
            lambda q, k, v: run(method, q, k, v, mask=Mask.padding([6]), return_lse=True)[1][:, :, :6],
            inputs,
            fast_mode=True,
        )
        lse = run(method, *inputs, mask=Mask.padding(keys=[0]), return_lse=True)[1]
        assert all((grad == 0).all() for grad in gradients(lse.masked_fill(lse.isneginf(), 0.0), *inputs))

    @where(lambda traits: not traits.learned)
    def test_bound_equals_the_bare_call(self, method: Method):
        bound = method.bind(heads=2, head_dim=8)
        mask = Mask.padding([24, 7])
        assert torch.equal(bound(*qkv(), mask=mask, seed=3), run(method, *qkv(), mask=mask, seed=3))
        assert list(bound.parameters()) == []

    @where(lambda traits: traits.learned)
    def test_learned_methods_exist_only_bound(self, method: Method):
        with pytest.raises(ValueError, match=f"'{method.name}'.*bind"):
            method(*qkv())
        bound = method.bind(heads=2, head_dim=8, max_length=64)
        assert list(bound.parameters()) or list(bound.buffers())

    @once
    def test_bound_for_other_heads_is_refused(self, method: Method):
        with pytest.raises(ValueError, match="bound for 4 heads of width 8"):
            method.bind(heads=4, head_dim=8, max_length=64)(*qkv())

    def test_bound_to_shared_key_heads(self, method: Method):
        q, k, v = qkv(H=4, G=2)
        bound = method.bind(heads=4, kv_heads=2, head_dim=8, max_length=64).eval()
        assert torch.equal(bound(q, k, v, **hidden_for(method, q)), run(method, q, k, v, enable_gqa=True))

    def test_activation_checkpointing_changes_no_gradient(self, method: Method):
        results = []
        for call in (run, functools.partial(checkpoint, run, use_reentrant=False)):
            inputs = tracked(*qkv())
            results.append(gradients(call(method, *inputs, mask=Mask.padding([24, 7])), *inputs))
        close(*results)

    def test_compiled_equals_eager_forward_and_backward(self, every: int):
        failures = compile_failures(self.all_methods()[::every])
        assert not failures, "\n".join(failures.values())

    def test_every_backend_that_runs_here_equals_the_reference(self, method: Method):
        """Or an error states why it refuses this call: never another result."""

        def results(backend: str, H: int, G: int, N: int) -> list[Tensor]:
            inputs = tracked(*qkv(N, H=H, G=G))
            with sq.use_backend(backend):
                out = run(method, *inputs, mask=Mask.padding([N, min(N, 7)]), enable_gqa=True)
                return [out, *gradients(out, *inputs)]

        for sizes in ((2, 2, 24), *sizes_of_one(method)):
            want = results("reference", *sizes)
            for name in (name for name, status in sq.backends().items() if status == "available"):
                try:
                    close(results(name, *sizes), want)
                except ValueError as refusal:
                    if f"backend {name!r} cannot run this call" not in str(refusal):
                        raise

    # ------------------------------------------------------------ plain data

    def test_operations_grow_as_the_traits_state(self, method: Method):
        def operations(tokens: int) -> int:
            with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
                run(method, *qkv(tokens, tokens))
            return counter.get_total_flops()

        growth = operations(512) / operations(128)  # 4 for linear work, 16 for quadratic
        assert (growth < 8) == method.traits.subquadratic

    def test_round_trips_as_dict_text_and_name(self, method: Method):
        assert sq.from_dict(json.loads(json.dumps(method.to_dict()))) == method
        assert sq.parse_method(str(method)) == method
        assert sq.parse_method(method.name) == type(method)()
        plain = type(method)()
        assert str(plain) == (plain.terms if isinstance(plain, sq.Sum) else method.name)  # a sum lists its parts

    def test_equal_settings_are_equal_and_fixed(self, method: Method):
        assert hash(sq.from_dict(method.to_dict())) == hash(method)
        for setting in fields(method):
            assert changed(method, setting) != method
            with pytest.raises(AttributeError):
                setattr(method, setting.name, 1)

    @where(lambda traits: traits.example)
    def test_nonsense_in_a_setting_is_refused_by_name(self, method: Method):
        for setting in fields(method):
            for bad in {int: (-1, True), float: (-1.0, float("nan")), str: ("many",)}[type(setting.default)]:
                with pytest.raises(ValueError, match=f"'{method.name}': {setting.name}={bad!r}, but it must be"):
                    replace(method, **{setting.name: bad})
            messages = {
                int: "='many' is not a whole number",
                float: "='many' is not a number",
                str: "='many', but it must",
            }
            with pytest.raises(ValueError, match=f"'{method.name}': {setting.name}{messages[type(setting.default)]}"):
                sq.parse_method(f"{method.name}:{setting.name}=many")

    @once
    def test_unknown_settings_are_refused_by_name(self, method: Method):
        with pytest.raises(TypeError, match=f"'{method.name}' has no setting 'colour'"):
            type(method)(colour="red")
        with pytest.raises(ValueError, match=f"'{method.name}' has no setting 'colour'"):
            sq.parse_method(f"{method.name}:colour=3")

    def test_traits_speak(self, method: Method):
        traits = method.traits
        assert traits.causal in ("strict", "values-only", "no")
        assert all(len(text) > 5 for text in (traits.dropout, traits.complexity, traits.source))

    # ------------------------------------------------------------ what traits deny raises

    def refused(self, method: Method, what: str, *inputs: Tensor, **options: object) -> None:
        with pytest.raises(ValueError, match=rf"'{re.escape(method.label)}' does not support .*{what}"):
            run(method, *(inputs or qkv()), **options)

    @once
    @where(lambda traits: not traits.cross)
    def test_cross_attention_is_refused(self, method: Method):
        self.refused(method, "cross-attention", *qkv(11, 19))

    @once
    @where(lambda traits: not traits.cross and not traits.cached)
    def test_a_step_on_a_cache_is_refused(self, method: Method):
        self.refused(method, "a step on a cache", *qkv(1, 19), mask=Mask(offset=18))

    @once
    @where(lambda traits: not traits.window)
    def test_a_window_is_refused(self, method: Method):
        self.refused(method, "a window", mask=Mask.window(3))

    @once
    @where(lambda traits: not traits.dense_mask)
    def test_a_dense_mask_is_refused(self, method: Method):
        self.refused(method, "a dense mask", mask=Mask.dense(torch.ones(1, 1, 24, 24, dtype=torch.bool)))

    @once
    @where(lambda traits: not traits.bias)
    def test_a_bias_is_refused(self, method: Method):
        self.refused(method, "an additive bias", bias=torch.zeros(1, 1, 24, 24))

    @once
    @where(lambda traits: not traits.lse)
    def test_the_log_sum_exp_is_refused(self, method: Method):
        self.refused(method, "return_lse=True", return_lse=True)
