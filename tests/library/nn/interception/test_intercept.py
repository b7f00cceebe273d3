"""`sq.intercept`: the method in every call of SDPA, exact attention elsewhere, and a table that says so."""

import contextlib
import json
import math
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import subquad as sq
from subquad.testing.oracle import gradients, normal, qkv, tracked
from tests.forks import output_of

ROUGH = "clustered:clusters=2"  # far from exact attention on random numbers


class Own(nn.Module):
    """A module of a user that calls SDPA."""

    def __init__(self, width: int = 16, heads: int = 2):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x, **options):
        B, N, width = x.shape
        q, k, v = self.qkv(x).view(B, N, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2).flatten(2))


MASKS = {
    "none": {},
    "is_causal": {"is_causal": True},
    "padding": {"attn_mask": torch.tensor([[True] * 9, [True] * 5 + [False] * 4])[:, None, None]},
    "causal": {"attn_mask": torch.ones(9, 9).tril().bool()},
    "window": {"attn_mask": torch.ones(9, 9).tril(2).triu(-2).bool()},
    "float": {"attn_mask": torch.zeros(9, 9).masked_fill(torch.ones(9, 9).triu(1).bool(), -math.inf)},
    "scattered": {
        "attn_mask": torch.eye(9).bool() | (torch.rand(9, 9, generator=torch.Generator().manual_seed(0)) > 0.5)
    },
    "bias": {"attn_mask": normal(2, 2, 9, 9)},
}
each_mask = pytest.mark.parametrize("options", MASKS.values(), ids=MASKS.keys())


@each_mask
def test_full_equals_sdpa_forward_and_backward(options):
    inputs = tracked(*qkv(9))
    want = F.scaled_dot_product_attention(*inputs, **options)
    with sq.intercept("full", strict=True) as seen:
        got = F.scaled_dot_product_attention(*inputs, **options)
    assert seen.replaced == 1
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(gradients(got, *inputs), gradients(want, *inputs))


@pytest.mark.parametrize("name", ["none", "padding"])
def test_the_method_runs(name):
    q, k, v = qkv(9)
    mask = sq.Mask.padding(keys=[9, 5]) if name == "padding" else None
    want = sq.attention(q, k, v, method=ROUGH, mask=mask, scale=0.2)
    for grad in (True, False):
        with sq.intercept(ROUGH) as seen, torch.set_grad_enabled(grad):
            got = F.scaled_dot_product_attention(q, k, v, scale=0.2, **MASKS[name])
        assert torch.equal(got, want)
        assert (seen.replaced, seen.exact) == (1, 0)


@pytest.mark.parametrize("hidden", [None, -math.inf, -1e9])
@pytest.mark.parametrize("method", [ROUGH, "full:kernel=subquad", "linear"])
def test_padding_of_both_sides_written_as_an_outer_product_is_recognised(method, hidden):
    q, k, v = qkv(70)
    real = torch.arange(70) < torch.tensor([[70], [50]])
    allowed = real[:, None, None, :] & real[:, None, :, None]
    attn_mask = allowed if hidden is None else torch.zeros(allowed.shape).masked_fill(~allowed, hidden)
    with sq.intercept(method) as seen:
        got = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask)
    assert (seen.replaced, seen.exact) == (1, 0), str(seen)
    torch.testing.assert_close(got, sq.attention(q, k, v, method=method, mask=sq.Mask.padding(real)))


@pytest.mark.parametrize("method", ["full", "oracle-top:topk=4", "shared-full"])
def test_a_query_that_a_float_mask_hides_all_keys_from_has_the_output_of_sdpa(method):
    q, k, v = qkv(9)
    attn_mask = torch.zeros(9, 9).masked_fill(~MASKS["scattered"]["attn_mask"], -math.inf)
    attn_mask[3] = -math.inf
    with sq.intercept(method) as seen:
        got = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask)
    assert (got[:, :, 3] == 0).all()
    assert got.isfinite().all()
    assert (F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask)[:, :, 3] == 0).all()
    assert seen.replaced == (method != "shared-full")


def test_calls_that_the_exact_kernel_hands_to_sdpa_are_counted_as_exact():
    calls = {"few queries": {}, "no masks": MASKS["scattered"], "bias": MASKS["bias"]}
    for reason, options in calls.items():
        with sq.intercept("full:kernel=subquad", strict=True) as seen:
            F.scaled_dot_product_attention(*qkv(9), **options)
        assert (seen.replaced, seen.exact) == (0, 1)
        assert reason in seen.calls[0].reason


def test_causal_by_halves_runs_where_no_gradient_would_leak_the_future():
    q, k, v = qkv(40)
    method = "clustered:clusters=2,block=8,last=0"
    with sq.intercept(method, strict=True):
        got = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        with pytest.raises(ValueError, match="training under a causal mask would leak the future"):
            F.scaled_dot_product_attention(q.requires_grad_(), k, v, is_causal=True)
    assert torch.equal(got, sq.attention(q.detach(), k, v, method=method, is_causal=True))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (MASKS["window"], "'clustered' does not support a window"),
        (MASKS["scattered"], "is not padding, causal, a window"),
        (MASKS["bias"], "floats that are added to the logits (other numbers than 0 and −inf"),
        ({"dropout_p": 0.5}, "dropout_p=0.5: what a method drops is not what SDPA drops"),
    ],
    ids=["window", "scattered", "bias", "dropout"],
)
def test_all_else_runs_exactly_and_is_said_or_raises(options, reason):
    q, k, v = qkv(9)
    torch.manual_seed(0)
    want = F.scaled_dot_product_attention(q, k, v, **options)
    torch.manual_seed(0)
    with sq.intercept(ROUGH) as seen:
        got = F.scaled_dot_product_attention(q, k, v, **options)
    assert torch.equal(got, want)
    assert (seen.replaced, seen.exact) == (0, 1)
    assert reason in seen.calls[0].reason
    assert "exact attention" in str(seen)
    with pytest.raises(ValueError, match=r"test_intercept\.py"), sq.intercept(ROUGH, strict=True):
        F.scaled_dot_product_attention(q, k, v, **options)


def test_a_mask_with_one_column_stands_for_all_keys():
    q, k, v = qkv(9)
    attn_mask = torch.arange(9)[:, None] < 3
    for given in (attn_mask, torch.zeros(9, 1).masked_fill(~attn_mask, -math.inf)):
        with sq.intercept("full", strict=True):
            got = F.scaled_dot_product_attention(q, k, v, attn_mask=given)
        torch.testing.assert_close(got, F.scaled_dot_product_attention(q, k, v, attn_mask=given))


@pytest.mark.parametrize("shape", [(7, 7), (2, 3, 9, 9), (2, 3, 1, 9), (9, 4), (4, 9)])
@pytest.mark.parametrize("method", ["full", "linear"])
def test_a_mask_of_another_size_is_an_error_as_in_sdpa(method, shape):
    q, k, v = qkv(9)
    attn_mask = torch.ones(shape).tril().bool() if shape[-1] == shape[-2] else torch.ones(shape).bool()
    with sq.intercept(method) as seen, pytest.raises(RuntimeError):
        F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask)
    assert "does not broadcast to attention of (2, 2, 9, 9)" in seen.calls[0].reason


def test_a_bias_that_is_learned_from_zero_gets_its_gradient():
    inputs = tracked(*qkv(9), torch.zeros(9, 9))
    q, k, v, bias = inputs
    for method, replaced in (("full", 1), ("linear", 0)):
        want = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        with sq.intercept(method) as seen:
            got = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        assert seen.replaced == replaced
        torch.testing.assert_close(gradients(got, *inputs), gradients(want, *inputs))


def test_calls_that_are_not_of_four_axes_run_exactly():
    x = normal(2, 9, 8)
    with sq.intercept(ROUGH) as seen:
        got = F.scaled_dot_product_attention(x, x, x)
    assert torch.equal(got, F.scaled_dot_product_attention(x, x, x))
    assert "got 3 axes" in seen.calls[0].reason


def test_autocast_casts_as_sdpa_does():
    q, k, v = qkv(9)
    with torch.autocast("cpu", dtype=torch.bfloat16), sq.intercept(ROUGH, strict=True):
        got = F.scaled_dot_product_attention(q, k, v)
    assert got.dtype == torch.bfloat16


def test_shared_key_heads():
    q, k, v = qkv(9, H=4, G=2)
    with sq.intercept(ROUGH, strict=True):
        got = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert torch.equal(got, sq.attention(q, k, v, method=ROUGH, enable_gqa=True))


def test_a_model_is_named_by_its_modules():
    model, x = nn.Sequential(Own(), nn.ReLU(), Own()), normal(2, 9, 16)
    with sq.intercept(ROUGH) as seen:
        model(x)
        model(x)
    assert [(row.where, row.times, str(row.method)) for row in seen.calls] == [
        ("0 (Own)", 2, ROUGH),
        ("2 (Own)", 2, ROUGH),
    ]
    assert not torch.allclose(model(x), _under(ROUGH, model, x))


def _under(method, model, *inputs, **options):
    with sq.intercept(method):
        return model(*inputs, **options)


def test_outside_of_the_context_nothing_is_replaced():
    q, k, v = qkv(9)
    with pytest.raises(RuntimeError, match="mine"), sq.intercept(ROUGH):
        raise RuntimeError("mine")
    with sq.intercept(ROUGH) as seen:
        pass
    F.scaled_dot_product_attention(q, k, v)
    assert seen.calls == []


def test_other_threads_are_left_alone():
    outs, (q, k, v) = [], qkv(9)
    with sq.intercept(ROUGH):
        thread = threading.Thread(target=lambda: outs.append(F.scaled_dot_product_attention(q, k, v)))
        thread.start()
        thread.join()
    assert torch.equal(outs[0], F.scaled_dot_product_attention(q, k, v))


def test_of_two_contexts_the_inner_one_has_the_calls():
    q, k, v = qkv(9)
    with sq.intercept("linear") as outer, sq.intercept("smyrf") as inner:
        causal = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        other = F.scaled_dot_product_attention(q, k, v)
    assert torch.equal(causal, F.scaled_dot_product_attention(q, k, v, is_causal=True))
    assert torch.equal(other, sq.attention(q, k, v, method="smyrf"))
    assert (inner.replaced, inner.exact, outer.calls) == (1, 1, [])


def test_the_last_context_of_all_threads_puts_torchs_fused_layers_back():
    entered, first_left = threading.Event(), threading.Event()

    def other() -> None:
        with sq.intercept(ROUGH):
            entered.set()
            first_left.wait()

    thread = threading.Thread(target=other)
    with sq.intercept(ROUGH):
        thread.start()
        entered.wait()
    between = torch.backends.mha.get_fastpath_enabled()
    first_left.set()
    thread.join()
    assert (between, torch.backends.mha.get_fastpath_enabled()) == (False, True)


def test_our_own_exact_attention_stays_exact():
    q, k, v = qkv(9)
    with sq.intercept(ROUGH) as seen:
        got = sq.attention(q, k, v, method="full")
    assert torch.equal(got, F.scaled_dot_product_attention(q, k, v))
    assert seen.calls == []


def test_methods_with_learned_parameters_are_refused():
    with pytest.raises(ValueError, match="has learned parameters, which belong to one layer"), sq.intercept("lha"):
        pass


def test_methods_of_self_attention_take_causal_calls_only():
    q, k, v = qkv(9)
    with sq.intercept("local:window=2") as seen:
        causal = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        other = F.scaled_dot_product_attention(q, k, v)
    assert torch.equal(causal, sq.attention(q, k, v, method="local:window=2", is_causal=True))
    assert torch.equal(other, F.scaled_dot_product_attention(q, k, v))
    assert "without a causal mask may be cross-attention" in seen.calls[1].reason


# ---------------------------------------------------------------- torch's own modules


def encoder(**options) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2).eval()


VALID = torch.tensor([[True] * 9, [True] * 5 + [False] * 4])


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    "masks", [{}, {"src_key_padding_mask": ~VALID}, {"mask": torch.ones(9, 9).triu(1).bool()}], ids=str
)
def test_torchs_encoder_is_seen_in_all_modes(training, grad, masks):
    model, x = encoder(dropout=0.0).train(training), normal(2, 9, 16)
    with torch.set_grad_enabled(grad):
        want = model(x, **masks)
        with sq.intercept("full", strict=True) as seen:
            got = model(x, **masks)
    assert [(row.where, row.times) for row in seen.calls] == [
        ("layers.0.self_attn (MultiheadAttention)", 1),
        ("layers.1.self_attn (MultiheadAttention)", 1),
    ]
    valid = VALID if "src_key_padding_mask" in masks else torch.ones_like(VALID)
    torch.testing.assert_close(got[valid], want[valid])


def test_torchs_encoder_runs_the_method():
    model, x = encoder(), normal(2, 9, 16)
    with torch.inference_mode():
        exact = model(x)
        assert not torch.allclose(_under(ROUGH, model, x), exact, atol=1e-3)


def test_torchs_decoder_and_layer():
    torch.manual_seed(0)
    model = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 2, 32, batch_first=True), 1).eval()
    x, y = normal(2, 9, 16), normal(2, 5, 16, seed=1)
    causal = nn.Transformer.generate_square_subsequent_mask(9)
    with torch.inference_mode():
        want = model(x, y, tgt_mask=causal)
        with sq.intercept("full", strict=True) as seen:
            got = model(x, y, tgt_mask=causal)
        assert seen.replaced == 2
        torch.testing.assert_close(got, want)
        with sq.intercept("smyrf") as seen:
            assert torch.equal(model(x, y, tgt_mask=causal), want)
        with sq.intercept("linear", strict=True):
            assert not torch.allclose(model(x, y, tgt_mask=causal), want, atol=1e-3)
    assert [(row.where, row.reason.partition(":")[0]) for row in seen.calls] == [
        ("layers.0.self_attn (MultiheadAttention)", "'smyrf' does not support a causal mask"),
        (
            "layers.0.multihead_attn (MultiheadAttention)",
            "'smyrf' mixes queries, and the queries of cross-attention may come from a causal decoder",
        ),
    ]


@pytest.mark.parametrize(  # torch's reentrant checkpoints refuse torch.autograd.grad
    ("use_reentrant", "run"),
    [(True, "Tensor.backward"), (True, "backward"), (False, "Tensor.backward"), (False, "grad")],
)
def test_checkpointing_computes_again_what_it_computed(use_reentrant, run):
    layer, x = encoder(dropout=0.0).layers[0], normal(2, 9, 16).requires_grad_()
    weight = layer.linear1.weight
    with sq.intercept(ROUGH, strict=True) as seen:
        want = torch.autograd.grad(layer(x).square().sum(), weight)[0]
        out = checkpoint(layer, x, use_reentrant=use_reentrant).square().sum()
        if run == "grad":
            got = torch.autograd.grad(out, weight)[0]
        else:
            out.backward() if run == "Tensor.backward" else torch.autograd.backward(out)
            got = weight.grad
    torch.testing.assert_close(got, want)
    assert seen.replaced == 3


def test_attention_weights_are_torchs_own():
    layer, x = nn.MultiheadAttention(16, 2, batch_first=True).eval(), normal(2, 9, 16)
    with sq.intercept(ROUGH) as seen:
        out, weights = layer(x, x, x)
    want, wanted = layer(x, x, x)
    torch.testing.assert_close((out, weights), (want, wanted))
    assert "need_weights=True asks for the attention weights" in seen.calls[0].reason
    assert seen.exact == 1
    with pytest.raises(ValueError, match="MultiheadAttention: need_weights=True"), sq.intercept(ROUGH, strict=True):
        layer(x, x, x)


def items(layout=torch.strided):
    return torch.nested.nested_tensor([normal(9, 16), normal(5, 16, seed=1)], layout=layout)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("stacked", [True, False])
def test_torchs_encoder_takes_nested_tensors_as_without_intercept(stacked, norm_first):
    model = encoder(dropout=0.0, norm_first=norm_first)
    model = model if stacked else model.layers[0]
    with torch.inference_mode():
        want = model(items())
        with sq.intercept("full", strict=True) as seen:
            got = model(items())
        padded = torch.nested.to_padded_tensor(items(), 0.0)
        with sq.intercept(ROUGH, strict=True):
            rough, of_padded = model(items()), model(padded, src_key_padding_mask=~VALID)
    assert seen.replaced == (2 if stacked else 1)
    assert got.is_nested
    assert got.layout == want.layout
    for one, other in zip(got.unbind(), want.unbind(), strict=True):
        torch.testing.assert_close(one, other)
    assert not torch.allclose(rough.unbind()[0], want.unbind()[0], atol=1e-3)
    if not stacked:  # in a second layer, the padded tokens of padded inputs are no longer 0
        torch.testing.assert_close(rough.unbind()[0], of_padded[0])
        torch.testing.assert_close(rough.unbind()[1], of_padded[1, :5])


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("lengths", [(9, 5), (9,), (5, 9), (9, 0), (3, 3)], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"need_weights": False}, {"average_attn_weights": False}, {"is_causal": False}], ids=str
)
def test_torchs_layer_takes_nested_tensors_as_without_intercept(options, lengths):
    layer = nn.MultiheadAttention(16, 2, batch_first=True).eval()
    x = torch.nested.nested_tensor([normal(length, 16, seed=number) for number, length in enumerate(lengths)])
    with torch.no_grad():
        want, weights = layer(x, x, x, **options)
        with sq.intercept("full") as seen:
            got, ours = layer(x, x, x, **options)
    torch.testing.assert_close(got.unbind(), want.unbind())
    torch.testing.assert_close(ours, weights)
    assert (seen.replaced, seen.exact) == ((1, 0) if weights is None else (0, 1))
    assert [row.where for row in seen.calls] == ["MultiheadAttention"]
    with torch.no_grad(), pytest.raises(ValueError, match="need_weights=True"), sq.intercept("full", strict=True):
        layer(x, x, x)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("made", "masks"),
    [
        ({"batch_first": False}, {}),
        ({"batch_first": True}, {"key_padding_mask": ~VALID}),
        ({"batch_first": True}, {"attn_mask": torch.zeros(9, 9).bool()}),
    ],
    ids=["tokens first", "padding", "mask"],
)
def test_nested_tensors_that_torch_refuses_are_refused_under_intercept_too(made, masks):
    layer, x = nn.MultiheadAttention(16, 2, **made).eval(), items()
    for context in (contextlib.nullcontext(), sq.intercept("full")):
        with torch.no_grad(), context, pytest.raises(AssertionError, match="does not support NestedTensor"):
            layer(x, x, x, need_weights=False, **masks)
    with torch.no_grad(), sq.intercept("full"), pytest.raises(AssertionError, match="does not support NestedTensor"):
        layer(x, items(), items(), need_weights=False)


@pytest.mark.usefixtures("unchecked")
def test_other_threads_run_nested_tensors_too():
    model, got = encoder(), []

    def other() -> None:
        with torch.inference_mode():
            got.append(model(items()))

    with torch.inference_mode():
        want = model(items())
    with sq.intercept(ROUGH) as seen:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert seen.calls == []
    torch.testing.assert_close(got[0].unbind(), want.unbind())


def test_padded_tokens_are_computed_where_torchs_fused_layers_return_zeros():
    model, x = encoder(), normal(2, 9, 16)
    with torch.inference_mode():
        want = model(x, src_key_padding_mask=~VALID)
        with sq.intercept("full", strict=True):
            got = model(x, src_key_padding_mask=~VALID)
    torch.testing.assert_close(got[VALID], want[VALID])
    assert not want[~VALID].any()
    assert got[~VALID].all()  # as the docstring says
    torch.testing.assert_close(got, model(x, src_key_padding_mask=~VALID))  # which torch itself does with gradients


def test_torchs_functions_are_what_they_were():
    before = F.scaled_dot_product_attention, F.has_torch_function, nn.MultiheadAttention.forward
    _under(ROUGH, encoder(), normal(2, 9, 16))
    with pytest.raises(RuntimeError, match="mine"), sq.intercept(ROUGH), sq.intercept("full"):
        raise RuntimeError("mine")
    assert (F.scaled_dot_product_attention, F.has_torch_function, nn.MultiheadAttention.forward) == before


# ---------------------------------------------------------------- compiled code


@pytest.mark.slow
def test_in_compiled_code_the_method_runs_or_an_error_says_why():
    seen = json.loads(output_of("tests.library.nn.interception.compiled"))
    assert "cannot be read here (while compiling" in seen.pop("mask that must be read")
    assert "does not support a causal mask" in seen.pop("own, causal")
    assert seen.pop("encoder, causal, rows") == [
        [f"layers.{number}.self_attn (MultiheadAttention)", "'smyrf' does not support a causal mask"]
        for number in (0, 1)
    ]
    assert (seen.pop("own rows"), seen.pop("encoder rows")) == (0, 0)
    assert {name for name, right in seen.items() if not right} == set()
