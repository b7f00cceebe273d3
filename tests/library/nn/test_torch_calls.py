"""`sq.nn.MultiheadAttention` in the place of torch's: weights, masks, encoders and decoders, nested inputs."""

import copy
import functools
import math

import pytest
import torch
from torch import nn

import subquad as sq
from subquad.testing.oracle import gradients, normal

ROUGH = "clustered:clusters=2"
VALID = torch.tensor([[True] * 9, [True] * 5 + [False] * 4])
FUTURE = torch.ones(9, 9).triu(1).bool()


def pair(method="full", **options) -> tuple[sq.nn.MultiheadAttention, nn.MultiheadAttention]:
    """Our layer and torch's with the same weights, loaded from torch's state dict."""
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(12, 4, **options).eval()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.3)  # torch starts with biases of 0
    ours = sq.nn.MultiheadAttention(12, 4, method=method, **{"batch_first": False, **options}).eval()
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


MASKS = {
    "none": {},
    "padding": {"key_padding_mask": ~VALID},
    "float padding": {"key_padding_mask": torch.zeros(2, 9).masked_fill(~VALID, -math.inf)},
    "causal": {"attn_mask": FUTURE},
    "causal with the hint": {"attn_mask": FUTURE, "is_causal": True},
    "float causal": {"attn_mask": nn.Transformer.generate_square_subsequent_mask(9)},
    "causal and padding": {"attn_mask": FUTURE, "key_padding_mask": ~VALID},
    "window": {"attn_mask": ~torch.ones(9, 9).tril(2).triu(-2).bool()},
    "of each head": {"attn_mask": normal(8, 9, 9) > 1},
    "bias": {"attn_mask": normal(8, 9, 9)},
}
each_mask = pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS.keys())


@each_mask
@pytest.mark.parametrize("batch_first", [True, False])
def test_full_equals_torch_forward_and_backward(masks, batch_first):
    ours, theirs = pair(batch_first=batch_first)
    x = normal(2, 9, 12) if batch_first else normal(9, 2, 12)
    x.requires_grad_()
    want, _ = theirs(x, x, x, need_weights=False, **masks)
    got, weights = ours(x, x, x, need_weights=False, **masks)
    assert weights is None
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(gradients(got, x), gradients(want, x), atol=1e-5, rtol=1e-4)


def test_a_bias_that_is_learned_from_zero_gets_its_gradient():
    ours, theirs = pair(batch_first=True)
    x, bias = normal(2, 9, 12), torch.zeros(9, 9, requires_grad=True)
    want, got = (layer(x, x, x, need_weights=False, attn_mask=bias)[0] for layer in (theirs, ours))
    torch.testing.assert_close(gradients(got, bias), gradients(want, bias), atol=1e-5, rtol=1e-4)


def test_other_widths_of_keys_and_values():
    ours, theirs = pair(batch_first=True, kdim=6, vdim=7)
    x, y, z = normal(2, 9, 12), normal(2, 5, 6, seed=1), normal(2, 5, 7, seed=2)
    hidden = torch.tensor([[False] * 5, [False, False, True, True, True]])
    want, _ = theirs(x, y, z, need_weights=False, key_padding_mask=hidden)
    torch.testing.assert_close(ours(x, y, z, key_padding_mask=hidden), want)
    assert ours.in_proj_weight is None
    assert (ours.kdim, ours.vdim) == (6, 7)


def test_inputs_without_a_batch():
    ours, theirs = pair(batch_first=True)
    x = normal(9, 12)
    for masks in ({}, {"key_padding_mask": ~VALID[1]}, {"attn_mask": FUTURE}, {"attn_mask": normal(4, 9, 9) > 1}):
        want, _ = theirs(x, x, x, need_weights=False, **masks)
        torch.testing.assert_close(ours(x, **masks), want)


def test_weights_come_from_torch_and_stay_ours():
    ours, theirs = pair()
    assert torch.equal(ours.in_proj_weight, theirs.in_proj_weight)
    assert torch.equal(ours.in_proj_bias, theirs.in_proj_bias)
    again = sq.nn.MultiheadAttention(12, 4)
    again.load_state_dict(ours.state_dict())
    assert torch.equal(again.q_proj.weight, ours.q_proj.weight)
    nested = nn.ModuleDict({"inner": copy.deepcopy(ours)})
    nested.load_state_dict({f"inner.{name}": 2 * tensor for name, tensor in theirs.state_dict().items()})
    assert torch.equal(nested["inner"].k_proj.bias, 2 * ours.k_proj.bias)


def test_weights_of_torch_without_biases():
    torch.manual_seed(0)
    theirs, ours = nn.MultiheadAttention(12, 4, bias=False), sq.nn.MultiheadAttention(12, 4, bias=False)
    ours.load_state_dict(theirs.state_dict())
    x = normal(9, 2, 12)
    torch.testing.assert_close(ours(x.transpose(0, 1)).transpose(0, 1), theirs(x, x, x, need_weights=False)[0])
    assert ours.in_proj_bias is None


def test_weights_for_as_many_key_heads_do_not_fit_fewer():
    with pytest.raises(
        ValueError, match=r"in_proj_weight has 36 rows, but the projections of this layer have 12 \+ 6 \+ 6"
    ):
        sq.nn.MultiheadAttention(12, 4, kv_heads=2).load_state_dict(nn.MultiheadAttention(12, 4).state_dict())


def test_the_result_is_torchs_pair_only_where_weights_are_declined():
    ours, x = pair(batch_first=True)[0], normal(2, 9, 12)
    assert isinstance(ours(x), torch.Tensor)
    assert isinstance(ours(x, need_weights=False), tuple)
    with pytest.raises(ValueError, match="need_weights=True, torch's default, asks for"):
        ours(x, need_weights=True)


def test_padded_queries_do_not_change_the_others():
    ours, x = pair(ROUGH, batch_first=True)[0], normal(2, 9, 12)
    out = ours(x, key_padding_mask=~VALID)
    torch.testing.assert_close(out[1, :5], ours(x[1:, :5])[0])
    changed = x.clone()
    changed[1, 5:] = 7.0
    torch.testing.assert_close(ours(changed, key_padding_mask=~VALID)[VALID], out[VALID])
    assert bool(out[1, 5:].std(-1).gt(0).all())  # and are computed


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        ({"attn_mask": MASKS["of each head"]["attn_mask"]}, "differs between heads"),
        ({"attn_mask": normal(9, 9)}, r"contains floats that are added to the logits \(other numbers than 0 and −inf"),
        ({"attn_mask": FUTURE[:5]}, r"`attn_mask` is \(5, 9\), but it must be \(9, 9\) or \(8, 9, 9\)"),
        ({"key_padding_mask": VALID[:, :5]}, r"`key_padding_mask` is \(2, 5\), but it must be \(2, 9\)"),
        ({"key_padding_mask": ~VALID, "mask": sq.Mask()}, "torch's masks are given together with `mask` or `bias`"),
    ],
)
def test_no_mask_is_dropped(masks, message):
    with pytest.raises(ValueError, match=message):
        pair(ROUGH, batch_first=True)[0](normal(2, 9, 12), **masks)


def test_a_float_mask_of_torchs_encoder_is_called_what_the_user_calls_it():
    layer = nn.TransformerEncoderLayer(12, 4, 24, batch_first=True, dropout=0.0)
    model, x = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), normal(2, 9, 12)
    sq.nn.swap(model, ROUGH)
    with pytest.raises(
        ValueError, match=r"^`attn_mask` \(`mask` or `src_mask` of torch's encoder.*'clustered'"
    ) as error:
        model(x, mask=normal(9, 9))
    assert "bias=" not in str(error.value)
    with pytest.raises(ValueError, match="a gradient is required"):
        model(x, mask=torch.zeros(9, 9, requires_grad=True))
    sq.nn.swap(model, "full")
    assert model(x, mask=normal(9, 9)).shape == x.shape


@pytest.mark.parametrize("method", [ROUGH, "full"])
def test_a_float_padding_that_hides_nothing_is_called_what_the_user_calls_it(method):
    ours, x = pair(method, batch_first=True)[0], normal(2, 9, 12)
    with pytest.raises(ValueError, match=r"^`key_padding_mask` contains floats .*True for padding"):
        ours(x, key_padding_mask=torch.full((2, 9), -3.0))


@pytest.mark.parametrize("masks", [{}, {"key_padding_mask": True}, {"attn_mask": True}])
@pytest.mark.parametrize("shape", [(0, 9, 12), (2, 0, 12), (0, 0, 12)])
@pytest.mark.parametrize("method", ["full", ROUGH, "lha:buckets=2"])
def test_empty_inputs_have_empty_outputs_and_gradients_as_in_torch(method, shape, masks):
    (B, N, _), x = shape, torch.zeros(shape, requires_grad=True)
    shapes = {"key_padding_mask": (B, N), "attn_mask": (N, N)}
    masks = {name: torch.zeros(shapes[name], dtype=torch.bool) for name in masks}
    ours, theirs = pair(method, batch_first=True) if method == "full" else (layer_of(method), layer_of("torch"))
    swapped = nn.ModuleList([layer_of("torch")])
    sq.nn.swap(swapped, method)
    wanted = theirs(x, x, x, need_weights=False)[0]  # with padding torch's own layer raises
    for layer in (ours, swapped[0]):
        out = layer(x, x, x, need_weights=False, **masks)[0]
        assert out.shape == wanted.shape == shape
        out.sum().backward()
        grads = [layer.get_parameter(name).grad for name, _ in layer.named_parameters() if "proj" in name]
        assert all(grad is not None and not grad.any() for grad in grads)


def layer_of(method: str) -> nn.Module:
    """Our layer with a method, or torch's."""
    kind = nn.MultiheadAttention if method == "torch" else functools.partial(sq.nn.MultiheadAttention, method=method)
    return kind(12, 4, batch_first=True)


@pytest.mark.parametrize("shapes", [((9, 12), (2, 9, 12)), ((2, 9, 12), (9, 12)), ((1, 2, 9, 12), (1, 2, 9, 12))])
def test_axes_that_do_not_fit_are_named(shapes):
    ours, (query, key) = pair(batch_first=True)[0], (normal(*shape) for shape in shapes)
    with pytest.raises(ValueError, match=r"axes, but they must all be \(B, tokens, width\)"):
        ours(query, key)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("method", ["full", ROUGH])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("replace_late", [True, False])
def test_in_torchs_encoder_the_method_runs_in_every_mode(method, grad, replace_late):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(12, 4, 24, batch_first=True, dropout=0.0)
    torchs = nn.TransformerEncoder(copy.deepcopy(layer), 2).eval()
    if replace_late:
        model = copy.deepcopy(torchs)
        for part in model.layers:
            part.self_attn = sq.nn.MultiheadAttention(12, 4, method=method)
    else:
        layer.self_attn = sq.nn.MultiheadAttention(12, 4, method=method)
        with pytest.warns(UserWarning, match="use_nested_tensor is False"):
            model = nn.TransformerEncoder(layer, 2)
    model.load_state_dict(torchs.state_dict())
    model.eval()
    x = normal(2, 9, 12)
    with torch.set_grad_enabled(grad):
        for masks in ({}, {"src_key_padding_mask": ~VALID}):
            got, want = model(x, **masks), torchs(x, **masks)
            same = torch.allclose(got[VALID], want[VALID], atol=1e-5)
            assert same == (method == "full")  # without hooks, which would keep torch from its fused path


def test_in_torchs_decoder():
    torch.manual_seed(0)
    torchs = nn.TransformerDecoderLayer(12, 4, 24, batch_first=True).eval()
    model = copy.deepcopy(torchs)
    model.self_attn, model.multihead_attn = (sq.nn.MultiheadAttention(12, 4) for _ in range(2))
    model.load_state_dict(torchs.state_dict())
    x, y = normal(2, 9, 12), normal(2, 5, 12, seed=1)
    masks = {"tgt_mask": nn.Transformer.generate_square_subsequent_mask(9), "tgt_key_padding_mask": ~VALID}
    masks = masks | {"tgt_key_padding_mask": torch.zeros(2, 9).masked_fill(~VALID, -math.inf)}
    torch.testing.assert_close(model.eval()(x, y, **masks), torchs(x, y, **masks))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_inputs_are_one_call_for_each_item(layout):
    ours = pair(batch_first=True)[0]
    items = [normal(9, 12), normal(5, 12, seed=1)]
    out = ours(torch.nested.nested_tensor(items, layout=layout))
    for got, item in zip(out.unbind(), items, strict=True):
        torch.testing.assert_close(got, ours(item))
    x = torch.nested.nested_tensor(items, layout=layout)
    with pytest.raises(ValueError, match="nested tensors are for self-attention"):
        ours(x, torch.nested.nested_tensor(items, layout=layout))
    with pytest.raises(ValueError, match="torch's masks are given together with nested inputs"):
        ours(x, key_padding_mask=~VALID)


def test_device_and_dtype():
    assert sq.nn.MultiheadAttention(12, 4, device="meta", dtype=torch.float64).q_proj.weight.dtype == torch.float64
    assert sq.nn.MultiheadAttention(12, 4, device="meta").out_proj.weight.device.type == "meta"
