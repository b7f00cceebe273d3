import copy

import pytest
import torch

import subquad as sq
from subquad import Mask
from subquad.testing.oracle import normal

METHODS = [sq.from_dict({"name": name, **sq.METHODS[name].traits.example}) for name in sq.list_methods()]
every_method = pytest.mark.parametrize("method", METHODS, ids=str)


def layer(method="full", seed=0, **options) -> sq.nn.MultiheadAttention:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return sq.nn.MultiheadAttention(12, 4, method=method, max_length=64, **options).eval()


def torch_layer(ours: sq.nn.MultiheadAttention, **options) -> torch.nn.MultiheadAttention:
    """PyTorch's own layer with our weights."""
    theirs = torch.nn.MultiheadAttention(12, 4, batch_first=True, **options)
    weights = [ours.q_proj.weight, ours.k_proj.weight, ours.v_proj.weight]
    state = {"out_proj.weight": ours.out_proj.weight, "out_proj.bias": ours.out_proj.bias}
    state["in_proj_bias"] = torch.cat([ours.q_proj.bias, ours.k_proj.bias, ours.v_proj.bias])
    if "kdim" in options:
        state.update(zip(("q_proj_weight", "k_proj_weight", "v_proj_weight"), weights, strict=True))
    else:
        state["in_proj_weight"] = torch.cat(weights)
    theirs.load_state_dict(state)
    return theirs


def test_full_equals_torch():
    x, ours = normal(2, 9, 12), layer()
    wanted, _ = torch_layer(ours)(x, x, x, need_weights=False)
    torch.testing.assert_close(ours(x), wanted)


def test_full_equals_torch_causal():
    x, ours = normal(2, 9, 12), layer()
    hidden = torch.ones(9, 9, dtype=torch.bool).triu(1)
    wanted, _ = torch_layer(ours)(x, x, x, need_weights=False, attn_mask=hidden)
    torch.testing.assert_close(ours(x, is_causal=True), wanted)
    torch.testing.assert_close(ours(x, mask=Mask.causal()), wanted)


def test_full_equals_torch_on_the_real_tokens_of_a_padded_batch():
    x, ours = normal(2, 9, 12), layer()
    valid = torch.arange(9) < torch.tensor([[9], [4]])
    wanted, _ = torch_layer(ours)(x, x, x, need_weights=False, key_padding_mask=~valid)
    torch.testing.assert_close(ours(x, mask=Mask.padding(valid))[valid], wanted[valid])


def test_full_equals_torch_across():
    x, y, z, ours = normal(2, 9, 12), normal(2, 5, 6, seed=1), normal(2, 5, 7, seed=2), layer(kdim=6, vdim=7)
    wanted, _ = torch_layer(ours, kdim=6, vdim=7)(x, y, z, need_weights=False)
    torch.testing.assert_close(ours(x, y, z), wanted)


def test_value_defaults_to_key_and_vdim_to_kdim():
    x, y, ours = normal(2, 9, 12), normal(2, 5, 6, seed=1), layer(kdim=6)
    assert torch.equal(ours(x, y), ours(x, y, y))


@every_method
def test_padded_outputs_are_the_bias_and_padding_does_not_matter(method):
    x, ours = normal(2, 24, 12), layer(method)
    out = ours(x, mask=Mask.padding([24, 9]))
    torch.testing.assert_close(out[1:, :9], ours(x[1:, :9]))
    torch.testing.assert_close(out[1, 9:], ours.out_proj.bias.expand(15, 12))


@every_method
def test_shared_key_heads_equal_repeated_weights(method):
    x, few, many = normal(2, 24, 12), layer(method, kv_heads=2), layer(method)
    for name in ("q_proj", "out_proj"):
        getattr(many, name).load_state_dict(getattr(few, name).state_dict())
    for name in ("k_proj", "v_proj"):
        for ours, theirs in zip(getattr(many, name).parameters(), getattr(few, name).parameters(), strict=True):
            repeated = theirs.data.unflatten(0, (2, 3)).repeat_interleave(2, dim=0).flatten(0, 1)
            ours.data.copy_(repeated)
    for ours, theirs in zip(many.attention.parameters(), few.attention.parameters(), strict=True):
        ours.data = theirs.data.repeat_interleave(len(ours) // len(theirs), dim=0)
    torch.testing.assert_close(few(x), many(x))


@every_method
def test_it_computes_projections_around_the_method(method):
    x, ours = normal(2, 24, 12), layer(method)
    q, k, v = (p(x).view(2, 24, 4, 3).transpose(1, 2) for p in (ours.q_proj, ours.k_proj, ours.v_proj))
    attend = method.bind(heads=4, head_dim=3, max_length=64).eval() if method.traits.learned else method
    wanted = ours.out_proj(attend(q, k, v, seed=5).transpose(1, 2).reshape(2, 24, 12))
    torch.testing.assert_close(ours(x, seed=5), wanted)


@every_method
def test_state_dict_round_trip(method):
    x, one, other = normal(2, 24, 12), layer(method, seed=0), layer(method, seed=1)
    assert not torch.allclose(one(x), other(x))
    other.load_state_dict(one.state_dict())
    assert torch.equal(one(x), other(x))
    assert torch.equal(copy.deepcopy(one)(x), one(x))


@every_method
def test_every_parameter_that_is_read_gets_a_gradient(method):
    ours = layer(method)
    ours(normal(2, 24, 12)).square().sum().backward()
    read = [ours.q_proj, ours.v_proj, ours.out_proj] + ([ours.k_proj] if method.traits.cross else [])
    assert all(m.weight.grad.abs().max() > 0 for m in read)


@every_method
def test_dropout_is_for_training_only(method):
    x, ours = normal(2, 24, 12), layer(method, dropout=0.5)
    without = layer(method)(x)
    torch.manual_seed(0)
    assert not torch.allclose(ours.train()(x), without)
    assert torch.equal(ours.eval()(x), without)


def test_a_bias_reaches_the_logits():
    x, ours = normal(2, 9, 12), layer()
    bias = torch.full((1, 1, 9, 9), -1e9).tril(-1) + torch.full((1, 1, 9, 9), -1e9).triu(1)
    torch.testing.assert_close(ours(x, bias=bias), ours.out_proj(ours.v_proj(x)))


def test_no_biases_where_none_are_wanted():
    names = [name for name, _ in layer(bias=False).named_parameters()]
    assert names == ["q_proj.weight", "k_proj.weight", "v_proj.weight", "out_proj.weight"]


def test_print_shows_the_method():
    assert "i-clustered:clusters=7" in repr(layer("i-clustered:clusters=7"))


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((12, 5), {}, "embed_dim=12 does not divide into num_heads=5"),
        ((12, 4), {"kv_heads": 3}, "num_heads=4 is not a multiple of kv_heads=3"),
        ((12, 0), {}, "num_heads=0"),
        ((0, 4), {}, "embed_dim=0"),
        ((12, 4), {"kv_heads": 0}, "kv_heads=0"),
        ((12, 4), {"kv_heads": -2}, "kv_heads=-2"),
        ((12, 4), {"dropout": 1.0}, "dropout=1.0"),
        ((12, 4), {"dropout": -0.5}, "dropout=-0.5"),
        ((12, 4), {"method": "fulll"}, "no method 'fulll'; did you mean 'full'"),
    ],
)
def test_bad_arguments_are_refused(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        sq.nn.MultiheadAttention(*arguments, **options)


@pytest.mark.parametrize(
    ("heads", "method", "part", "error", "message"),
    [
        (8, "lha:buckets=4", "attention.learned", ValueError, r"\(4, 4, 64\), but .* 8 heads of width 2 on 8"),
        (4, "lha:buckets=32", "attention.learned", ValueError, r"\(4, 64, 4\), but .* has \(4, 64, 32\)"),
        (4, "full", "attention.learned", ValueError, "is a HashFunctions, but full has no learned parameters"),
        (4, "rfa", "attention.learned", TypeError, "is a HashFunctions, but .* of rfa are a RfaParameters"),
        (4, "lha:buckets=4", "attention", TypeError, r"is a BoundMethod, but .*give other.attention.learned"),
        (4, "lha:buckets=4", "", TypeError, r"is a MultiheadAttention, but .*give other.attention.learned"),
    ],
)
def test_learned_parameters_of_another_layer_must_be_those_of_this_one(heads, method, part, error, message):
    shared = sq.nn.MultiheadAttention(16, 4, method="lha:buckets=4").get_submodule(part)
    with pytest.raises(error, match=message):
        sq.nn.MultiheadAttention(16, heads, method=method, shared=shared)


def test_inputs_of_another_width_are_refused_with_both_widths():
    attention = sq.nn.MultiheadAttention(12, 4, kdim=8, vdim=6)
    x, keys, values = torch.randn(2, 5, 12), torch.randn(2, 7, 8), torch.randn(2, 7, 6)
    assert attention(x, keys, values).shape == x.shape
    with pytest.raises(ValueError, match="the queries are 10 wide, but this layer takes queries of width 12"):
        attention(x[..., :10], keys, values)
    with pytest.raises(ValueError, match="the keys are 12 wide, but this layer takes keys of width 8"):
        attention(x)
    with pytest.raises(ValueError, match="the values are 8 wide, but this layer takes values of width 6"):
        attention(x, keys)
    attention.k_proj, attention.v_proj = torch.nn.Linear(16, 12), torch.nn.Linear(16, 12)  # other projections count
    assert attention(x, torch.randn(2, 7, 16)).shape == x.shape


RECURRENT = pytest.mark.parametrize("method", [method for method in METHODS if method.traits.recurrent], ids=str)


@RECURRENT
def test_steps_equal_the_causal_layer(method):
    x, ours = normal(2, 24, 12), layer(method, kv_heads=2)
    state, outs = ours.init_state(2), []
    for start, end in ((0, 13), (13, 20), *((t, t + 1) for t in range(20, 24))):
        out, state = ours.step(x[:, start:end], state, seed=5)
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, 1), ours(x, is_causal=True, seed=5), atol=1e-5, rtol=1e-4)


@RECURRENT
def test_a_left_padded_prompt_gives_the_state_of_its_tokens(method):
    x, ours = normal(2, 24, 12), layer(method)
    valid = torch.ones(2, 20, dtype=torch.bool)
    valid[1, :8] = False
    out, state = ours.step(x[:, :20], ours.init_state(2), mask=Mask.padding(valid))
    last, _ = ours.step(x[:, 20:], state)
    alone = ours(x[1:, 8:], is_causal=True)
    torch.testing.assert_close(torch.cat([out[1:, 8:], last[1:]], 1), alone, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(out[1, :8], ours.out_proj.bias.expand(8, 12))


def test_a_layer_in_bf16_keeps_its_state_in_fp32():
    ours = layer("linear").bfloat16()
    state = ours.init_state(2)
    out, after = ours.step(normal(2, 3, 12, dtype=torch.bfloat16), state)
    assert out.dtype == torch.bfloat16
    assert {x.dtype for x in (*state.values(), *after.values())} == {torch.float32}


def test_a_layer_that_drops_takes_no_steps():
    ours = layer("linear", dropout=0.5)
    ours.step(normal(2, 1, 12), ours.init_state(2))
    with pytest.raises(ValueError, match=r"trains with dropout=0\.5; call eval\(\)"):
        ours.train().step(normal(2, 1, 12), ours.init_state(2))


def test_a_method_without_a_state_takes_no_steps():
    with pytest.raises(ValueError, match="'full' keeps no state of a fixed size"):
        layer("full").init_state(2)
    with pytest.raises(ValueError, match="'full' keeps no state of a fixed size"):
        layer("full").step(normal(2, 1, 12), {})


def test_what_the_method_refuses_the_layer_refuses():
    with pytest.raises(ValueError, match="'smyrf' does not support a causal mask"):
        layer("smyrf")(normal(2, 9, 12), is_causal=True)
