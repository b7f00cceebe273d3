"""Exact attention of a few queries in compiled code: equal to the formula, whatever hidden keys and values hold."""

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

import subquad as sq
from subquad.kernels import native
from subquad.kernels.attention.steps.op import MOST_QUERIES, attend_few, prepare_few
from subquad.kernels.attention.steps.reference import visible_keys
from subquad.kernels.native import interface
from subquad.testing.oracle import normal
from subquad.tools.bench.calls import threads

pytestmark = pytest.mark.skipif(native.refusal() is not None, reason=f"no compiled kernels: {native.refusal()}")

VARIANTS = native.variants() if native.refusal() is None else []
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 1.2e-2, torch.float16: 1.5e-3}


def inputs_of(N: int, M: int, *, B: int = 2, H: int = 6, G: int = 2, D: int = 20, E: int = 13) -> list[Tensor]:
    shapes = (B, H, N, D), (B, G, M, D), (B, G, M, E)
    return [normal(*shape, seed=i) for i, shape in enumerate(shapes)]


def formula(query: Tensor, key: Tensor, value: Tensor, valid: Tensor | None, **options: object):
    """The op in fp64, from all logits."""
    with sq.use_backend("reference"):
        return attend_few(query.double(), key.double(), value.double(), valid, **options)


def compiled(variant: str, *arguments: object, **options: object) -> tuple[Tensor, Tensor]:
    with torch.no_grad(), sq.use_backend("cpu"), native.use_variant(variant):
        return attend_few(*arguments, **options)


def assert_close(have: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], dtype: torch.dtype, scale: float = 1.0):
    assert (have[0].dtype, have[1].dtype) == (dtype, torch.float32)
    assert torch.equal(have[1].isneginf(), want[1].isneginf())
    tolerance = ROUNDING[dtype] * scale
    torch.testing.assert_close(have[0].double(), want[0], atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(have[1].double(), want[1], atol=2e-5, rtol=1e-5)


@st.composite
def calls(draw: st.DrawFn) -> tuple[list[Tensor], Tensor | None, dict[str, object]]:
    """Inputs, padding and options of any kind."""
    B, G = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    H, N = G * draw(st.sampled_from([1, 2, 3, 4, 5, 9])), draw(st.integers(1, MOST_QUERIES))
    M = draw(st.one_of(st.integers(0, 40), st.sampled_from([97, 255, 256, 257, 300, 701])))
    D, E = (draw(st.sampled_from([1, 3, 8, 16, 20, 32, 33, 64, 80, 96, 128])) for _ in range(2))
    dtype = draw(st.sampled_from([*ROUNDING]))
    inputs = [x.to(dtype) for x in inputs_of(N, M, B=B, H=H, G=G, D=D, E=E)]
    layout = draw(st.sampled_from(["packed", "token-major", "slice of a cache", "slice of rows", "expanded"]))
    if layout == "token-major":
        inputs = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    elif layout == "slice of a cache":
        inputs[1:] = (torch.cat([x, torch.full_like(x, torch.nan)], 2)[:, :, :M] for x in inputs[1:])
    elif layout == "slice of rows":
        inputs = [torch.cat([x, torch.full_like(x, torch.nan)], 3)[..., : x.shape[3]] for x in inputs]
    elif layout == "expanded":
        inputs[1:] = (x[:1].expand(B, -1, -1, -1) for x in inputs[1:])
    kind, generator = draw(st.sampled_from(["none", "left", "right", "holes"])), torch.Generator().manual_seed(B * M)
    ends = torch.tensor([[draw(st.integers(0, M))] for _ in range(B)])
    at = torch.arange(M)
    valid = {"none": None, "left": at >= ends, "right": at < ends, "holes": torch.rand(B, M, generator=generator) < 0.7}
    options: dict[str, object] = {
        "causal": draw(st.booleans()),
        "offset": draw(st.sampled_from([0, M - N, M // 2, -7, 2**40, -(2**40)])),
        "scale": draw(st.sampled_from([0.3, -0.2, 0.0])),
        "window": draw(st.sampled_from([None, None, 0, 3, 50, 2**40])),
        "softcap": draw(st.sampled_from([None, None, 0.5, 30.0])),
        "offsets": draw(st.sampled_from([None, torch.tensor([draw(st.integers(-9, M + 9)) for _ in range(B)])])),
        "valid_queries": draw(st.sampled_from([None, torch.rand(B, N, generator=generator) < 0.7])),
    }
    return inputs, valid[kind], options


@pytest.mark.parametrize("variant", VARIANTS)
@given(call=calls())
@settings(max_examples=60, deadline=None)
def test_outputs_are_those_of_the_formula(variant, call):
    inputs, valid, options = call
    assert_close(compiled(variant, *inputs, valid, **options), formula(*inputs, valid, **options), inputs[0].dtype)


@pytest.mark.parametrize("variant", VARIANTS)
@given(call=calls(), poison=st.sampled_from([torch.nan, torch.inf, -torch.inf]))
@settings(max_examples=40, deadline=None)
def test_what_no_query_sees_changes_no_bit(variant, call, poison):
    inputs, valid, options = call
    inputs = [x.clone() for x in inputs]
    before = compiled(variant, *inputs, valid, **options)
    patterns = (options[name] for name in ("causal", "offset", "offsets", "window", "valid_queries"))
    allowed = visible_keys(inputs[0], inputs[1], valid, *patterns)
    if allowed is None:
        return
    hidden = ~allowed.expand(inputs[0].shape[0], 1, inputs[0].shape[2], -1)
    for x in inputs[1:]:
        x.masked_fill_(hidden.all(2)[..., None], poison)
    if options["valid_queries"] is not None:
        inputs[0].masked_fill_(~options["valid_queries"][:, None, :, None], poison)
    after = compiled(variant, *inputs, valid, **options)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("implementation", ["reference", *VARIANTS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("side", [0, 1, 2])
@pytest.mark.parametrize("window", [None, 9])
def test_what_one_query_sees_stays_with_it(window, side, poison, dtype, implementation):
    """The poisoned key, of item 1 and key head 0, is seen by queries 5 and later, until it leaves their window."""
    N, M, at = 20, 300, 285
    inputs = [x.to(dtype) for x in inputs_of(N, M, D=32, E=32)]
    options = {"causal": True, "offset": M - N, "scale": 0.3, "window": window}

    def run() -> tuple[Tensor, Tensor]:
        if implementation != "reference":
            return compiled(implementation, *inputs, None, **options)
        with sq.use_backend("reference"):
            return attend_few(*inputs, None, **options)

    before = run()
    inputs[side][1, 0, at if side else 5] = poison
    out, lse = run()
    reached = torch.zeros(2, 6, N, dtype=torch.bool)
    if side == 0:
        reached[1, 0, 5] = True
    else:
        reached[1, :3, 5 : None if window is None else 5 + window + 1] = True
    assert torch.equal(out[~reached], before[0][~reached])
    assert not out[reached].isfinite().all(-1).any()
    if side == 2:
        assert torch.equal(lse, before[1])


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_is_read_before_it_is_written(variant):
    for N, M, D, E in ((1, 40, 8, 8), (5, 700, 20, 13), (32, 300, 64, 64)):
        inputs = inputs_of(N, M, D=D, E=E)
        options = {"causal": True, "offset": M - N, "scale": 0.3, "offsets": torch.tensor([0, -M // 2])}
        assert_close(compiled(variant, *inputs, None, **options), formula(*inputs, None, **options), torch.float32)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("N", [1, 3, 32])
def test_results_depend_neither_on_threads_nor_on_what_lies_behind(N, dtype, variant, monkeypatch):
    monkeypatch.setattr(interface, "SMALL", 0)
    inputs = [x.to(dtype) for x in inputs_of(N, 2300, D=32, E=32)]
    options = {"causal": True, "offset": 1500, "scale": 0.3, "offsets": torch.tensor([0, 700 - N])}
    results = []
    for number, length in ((1, 2300), (2, 2300), (3, 2300), (2, 2200)):
        with threads(number):
            shorter = [inputs[0], *(x[:, :, :length] for x in inputs[1:])]
            results.append(compiled(variant, *shorter, None, **options))
    for more in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], more, strict=True))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_over_many_keys(dtype, variant):
    """The error does not grow with the number of keys; 300,000 equal ones are one row in memory."""
    query, key, value = (x.to(dtype) for x in inputs_of(2, 1, D=16, E=16))
    key, value = (x.expand(-1, -1, 300_000, -1) for x in (key, value))
    out, lse = compiled(variant, query, key, value, None, causal=False, offset=0, scale=0.3)
    limit = 2e-6 if dtype == torch.float32 else 2**-8
    want = value[:, :, :2].repeat_interleave(3, 1).double()
    assert ((out.double() - want).abs() / want.abs()).max() < limit
    logits = (query * key[:, :, :2].repeat_interleave(3, 1)).double().sum(-1) * 0.3
    torch.testing.assert_close(lse.double(), logits + torch.tensor(300_000.0).log(), atol=2e-2, rtol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("step", [1.0, -1.0])
def test_logits_that_rise_or_fall_along_the_keys(step, variant):
    inputs = inputs_of(3, 1500, D=32, E=32)
    inputs[0][..., 0], inputs[1][..., 0] = 10.0, step * torch.linspace(-15.0, 15.0, 1500)
    options = {"causal": False, "offset": 0, "scale": 1.0}
    have, want = compiled(variant, *inputs, None, **options), formula(*inputs, None, **options)
    assert_close(have, want, torch.float32, scale=5.0)


@pytest.mark.parametrize("implementation", ["reference", *VARIANTS])
def test_rows_of_infinite_logits(implementation):
    """All −∞: NaN, as of a softmax, and lse −∞. A query that sees no key at all: 0."""
    query, key, value = inputs_of(2, 30, D=16, E=16)
    query[:], key[:, :, :, 0] = torch.tensor([1.0] + [0.0] * 15), -torch.inf
    key[..., 1:] = 0.0
    options = {"causal": True, "offset": -1, "scale": 1.0}
    if implementation == "reference":
        with sq.use_backend("reference"):
            out, lse = attend_few(query, key, value, None, **options)
    else:
        out, lse = compiled(implementation, query, key, value, None, **options)
    assert (out[:, :, 0] == 0).all()
    assert out[:, :, 1].isnan().all()
    assert lse.isneginf().all()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("cap", [1e-3, 1.0, 50.0])
def test_capped_logits(cap, variant):
    inputs = inputs_of(4, 300, D=32, E=32)
    inputs[0] *= 10.0
    options = {"causal": False, "offset": 0, "scale": 1.0, "softcap": cap}
    assert_close(compiled(variant, *inputs, None, **options), formula(*inputs, None, **options), torch.float32, 4.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("D", [64, 80, 128])
@pytest.mark.parametrize("N", [1, 16])
def test_its_error_is_not_above_that_of_sdpa(N, D, dtype):
    inputs = [x.to(dtype) for x in inputs_of(N, 2048, H=6, G=2, D=D, E=D)]
    want = formula(*inputs, None, causal=False, offset=0, scale=D**-0.5)[0]
    out = compiled(VARIANTS[0], *inputs, None, causal=False, offset=0, scale=D**-0.5)[0]
    sdpa = F.scaled_dot_product_attention(*inputs, enable_gqa=True)
    error, of_sdpa = ((x.double() - want).pow(2).mean().sqrt() for x in (out, sdpa))
    assert error <= 1.1 * of_sdpa


def test_refusals():
    inputs = inputs_of(2, 30)
    options = {"causal": False, "offset": 0, "scale": 1.0}
    assert attend_few.takes(*inputs, None, **options)
    with sq.use_backend("cpu"):
        with pytest.raises(ValueError, match="gradient"):
            attend_few(inputs[0].requires_grad_(), *inputs[1:], None, **options)
        with pytest.raises(ValueError, match="33 queries"):
            attend_few(*inputs_of(33, 30), None, **options)
        with pytest.raises(ValueError, match="float64"):
            attend_few(*(x.detach().double() for x in inputs), None, **options)
        with torch.no_grad():
            attend_few(*inputs, None, **options)
            with pytest.raises(ValueError, match="`valid` is"):
                attend_few(*inputs, torch.ones(2, 29, dtype=torch.bool), **options)
            with pytest.raises(ValueError, match="`offsets` is"):
                attend_few(*inputs, None, offsets=torch.zeros(2, dtype=torch.int32), **options)
    grads = torch.autograd.grad(attend_few(*inputs, None, **options)[0].sum(), inputs[0])
    assert grads[0].isfinite().all()
    tangents = torch.func.jvp(lambda x: attend_few(x, *inputs[1:], None, **options)[0], (inputs[0],), (inputs[0],))
    assert tangents[1].isfinite().all()


def test_compiled_graphs_serve_all_offsets():
    """A static cache: the offset is a tensor, and no step compiles again."""
    query, key, value = inputs_of(1, 300, B=1, D=32, E=32)

    def step(query: Tensor, key: Tensor, value: Tensor, at: Tensor) -> Tensor:
        return attend_few(query, key, value, None, causal=True, offset=0, scale=0.3, offsets=at)[0] * 2.0

    torch._dynamo.reset()
    fast = torch.compile(step, fullgraph=True, backend="aot_eager")
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for at in (0, 7, 255, 299):
            at = torch.tensor([at])
            assert torch.equal(fast(query, key, value, at), step(query, key, value, at))


@given(call=calls())
@settings(max_examples=60, deadline=None)
def test_prepared_calls_are_the_same_bits(call):
    """The calls get other tensors than those with which they were prepared, in any layout."""
    inputs, valid, options = call
    with torch.no_grad(), sq.use_backend("cpu"):
        attend = prepare_few(*(torch.zeros_like(x) for x in inputs), valid, **options)
        for others in (inputs, [x.flip(2) for x in inputs], [x.mT.contiguous().mT for x in inputs]):
            assert torch.equal(attend(*others), attend_few(*others, valid, **options)[0])


def test_prepared_calls_take_tensors_like_those_before():
    inputs = inputs_of(1, 30)
    attend = prepare_few(*inputs, None, causal=False, offset=0, scale=1.0)
    for number, other in enumerate((inputs[0][:, :4], inputs[1][:, :, 1:], inputs[2].double())):
        changed = [other if i == number else x for i, x in enumerate(inputs)]
        with pytest.raises(ValueError, match="'steps_forward' was prepared for"):
            attend(*changed)


def test_prepared_calls_get_the_workspace_of_their_own_tensors(variant, monkeypatch):
    """How much that is depends on addresses: rows of 16 bits at an odd place are copied first."""
    query, key, value = (x.bfloat16() for x in inputs_of(1, 300, D=64, E=64))
    odd = torch.cat([key.new_zeros(1), key.flatten()])[1:].view(key.shape)
    sizes = []
    monkeypatch.setattr(torch, "empty", lambda *size, empty=torch.empty, **kw: sizes.append(size) or empty(*size, **kw))
    with torch.no_grad(), native.use_variant(variant):
        like, for_odd = (prepare_few(query, x, value, None, causal=False, offset=0, scale=1.0) for x in (key, odd))
        sizes.clear()
        outputs = [attend(query, odd, value) for attend in (like, for_odd)]
    assert sizes[0] == sizes[1]
    assert torch.equal(*outputs)


def test_modes_and_profilers_see_prepared_calls():
    inputs = inputs_of(1, 30)
    attend = prepare_few(*inputs, None, causal=False, offset=0, scale=1.0)
    with FlopCounterMode(display=False) as counter:
        attend(*inputs)
    assert counter.get_total_flops() == 2 * 2 * 6 * 30 * (20 + 13)
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        attend(*inputs)
    assert "subquad::steps_forward" in {event.key for event in trace.key_averages()}


def test_no_prepared_call_where_the_kernel_does_not_run():
    inputs = inputs_of(1, 30)
    options = {"causal": False, "offset": 0, "scale": 1.0}
    assert prepare_few(*(x.double() for x in inputs), None, **options) is None
    with sq.use_backend("reference"):
        assert prepare_few(*inputs, None, **options) is None
