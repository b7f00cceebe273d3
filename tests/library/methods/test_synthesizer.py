"""Synthesizers against the dense formula, the layer's input on its way to them, and what they refuse."""

import pytest
import torch
from torch import Tensor

import subquad as sq
from subquad import Mask
from subquad.methods.synthesizer import KINDS, MIXTURES
from subquad.testing.oracle import hidden_for, normal, qkv
from tests.library.hf.models import build
from tests.library.methods.random_calls import FEW_AND_MANY, RandomCall, assert_equal_both_ways, random_calls
from tests.research.training.models.build import batch_for
from tests.research.training.models.build import build as build_encoder

LENGTH = 40  # of the random calls


def perceptron(learned, x: Tensor, head: int) -> Tensor:
    """W₂ relu(W₁ x + b₁) + b₂."""
    parts = (learned.inner, learned.inner_bias, learned.outer, learned.outer_bias)
    inner, inner_bias, outer, outer_bias = (part[head].to(x.dtype) for part in parts)
    return (x @ inner + inner_bias).clamp(min=0) @ outer + outer_bias


def rows_of(learned, kind: str, x: Tensor | None, head: int, ranks: list[int]) -> Tensor:
    """The logits of tokens of these ranks, with these inputs, for the keys of all ranks."""
    if kind == "random":
        return learned.logits[head, ranks]
    if kind == "factorised-random":
        return learned.rows[head, ranks] @ learned.columns[head].T
    if kind == "dense":
        return perceptron(learned.of_token, x, head)
    first, second = (perceptron(of, x, head) for of in (learned.first, learned.second))
    b = second.shape[1]
    return first[:, [j // b for j in range(LENGTH)]] * second[:, [j % b for j in range(LENGTH)]]


def weights_of(call: RandomCall, products: Tensor, item: int, head: int) -> Tensor:
    """Softmax of the mixed logits (N,M) over the keys that each query sees."""
    (N, M), learned, mask = products.shape, call.bound.learned, call.mask
    hidden = hidden_for(call.bound.method, call.inputs[0]).get("hidden")
    seen, valid = mask.to_dense(N, M).expand(len(call.inputs[0]), 1, N, M)[item, 0], mask.key_padding(M)
    keys = list(range(M)) if valid is None else valid[item].nonzero()[:, 0].tolist()
    ranks = [max(sum(key <= i for key in keys) - 1, 0) for i in range(N)]
    logits = []
    for kind in call.bound.method.logits.split("-and-"):
        if kind == "dot":
            logits.append(products)
            continue
        x = None if hidden is None else hidden[item]
        of_ranks = rows_of(learned.kinds[kind], kind, x, head, ranks).to(products.dtype)
        logits.append(torch.zeros_like(products).index_copy(1, torch.tensor(keys).long(), of_ranks[:, : len(keys)]))
    shares = torch.ones(1) if learned.shares is None else learned.shares[head].softmax(0)
    mixed = sum(share.to(products.dtype) * part for share, part in zip(shares, logits, strict=True))
    return mixed.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)


def oracle(call: RandomCall) -> Tensor:
    """Item by item and head by head."""
    query, key, value = call.inputs
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    products = query @ key.mT * query.shape[3] ** -0.5
    items = [
        torch.stack([weights_of(call, products[b, h], b, h) @ value[b, h] for h in range(query.shape[1])])
        for b in range(len(query))
    ]
    return torch.stack(items)


@FEW_AND_MANY
@pytest.mark.parametrize("logits", [
    "random-and-dot", "factorised-random", "random-and-dense", "factorised-dense-and-dot",
])  # fmt: skip
def test_equals_the_dense_formula_forward_and_backward(logits: str, shapes: int):
    for call in random_calls(sq.Synthesizer(logits=logits, rank=3), shapes):
        for parameter in call.bound.parameters():
            parameter.data += 0.3 * normal(*parameter.shape, seed=5)
        out = call.bound(*call.inputs, mask=call.mask, **hidden_for(call.bound.method, call.inputs[0]))
        assert_equal_both_ways(call, out, oracle(call), *call.bound.parameters())


# ---------------------------------------------------------------------- the layer's input


@pytest.mark.parametrize("logits", [*KINDS, *MIXTURES])
def test_every_kind_trains_in_a_layer(logits):
    layer = sq.nn.MultiheadAttention(12, 2, method=f"synthesizer:logits={logits}", max_length=30)
    layer(normal(2, 20, 12), mask=Mask.padding([20, 7]), is_causal=True).square().sum().backward()
    idle = () if "dot" in logits else ("q_proj", "k_proj")  # nothing reads them
    for name, parameter in layer.named_parameters():
        has_gradient = parameter.grad is not None and bool(parameter.grad.any())
        assert has_gradient != name.startswith(idle) or name == "k_proj.bias", name


def test_dense_logits_read_the_input_and_not_the_projected_queries():
    layer, x = sq.nn.MultiheadAttention(12, 2, method="synthesizer:logits=dense", max_length=30), normal(2, 20, 12)
    bound, out = layer.attention, layer(x)
    layer.q_proj.weight.data.mul_(3.0)
    assert torch.equal(layer(x), out)
    value = layer._split(layer.v_proj(x), 2)
    query = torch.zeros(2, 2, 20, 6)
    assert torch.equal(layer._join(bound(query, query, value, hidden=x)), out)
    assert not torch.allclose(layer._join(bound(query, query, value, hidden=2 * x)), out, atol=1e-4)


def test_packed_segments_take_the_input_apart_with_the_rest():
    layer, x = sq.nn.MultiheadAttention(12, 2, method="synthesizer:logits=dense", max_length=30), normal(1, 20, 12)
    ids = torch.tensor([[0] * 8 + [1] * 12])
    packed = layer(x, mask=Mask.segments(ids))
    torch.testing.assert_close(packed, torch.cat([layer(x[:, :8]), layer(x[:, 8:])], dim=1))


def test_padding_of_the_input_may_hold_anything():
    layer, x = sq.nn.MultiheadAttention(12, 2, method="synthesizer:logits=dense", max_length=30), normal(2, 20, 12)
    dirty = x.clone()
    dirty[1, 7:] = torch.nan
    mask = Mask.padding([20, 7])
    assert torch.equal(layer(dirty, mask=mask)[0], layer(x, mask=mask)[0])
    assert torch.equal(layer(dirty, mask=mask)[1, :7], layer(x, mask=mask)[1, :7])


def test_by_length_hands_the_input_of_each_item_on():
    layer = sq.nn.MultiheadAttention(
        12, 2, method="by-length:steps=0:synthesizer:logits=dense+10:local:window=2", max_length=30
    )
    alone = sq.nn.MultiheadAttention(12, 2, method="synthesizer:logits=dense", max_length=30)
    weights = {name.replace("learned.0", "learned"): x for name, x in layer.state_dict().items()}
    alone.load_state_dict(weights)
    x = normal(2, 20, 12)
    out = layer(x, mask=Mask.padding([20, 7]))
    torch.testing.assert_close(out[1, :7], alone(x[1:, :7])[0])
    assert not torch.allclose(out[0], alone(x[:1])[0], atol=1e-3)


def test_torchs_own_layers_hand_it_on():
    theirs = torch.nn.MultiheadAttention(12, 2, batch_first=True)
    sq.nn.swap(theirs, "synthesizer:logits=dense", max_length=30)
    x = normal(2, 20, 12)
    out, _ = theirs(x, x, x, need_weights=False)
    theirs.in_proj_weight.data[:24].mul_(3.0)  # of queries and keys
    assert torch.equal(theirs(x, x, x, need_weights=False)[0], out)


def test_models_of_subquad_hand_it_on_and_come_back_from_a_folder(tmp_path):
    model = build_encoder(method="synthesizer:logits=random-and-dense")
    batch = batch_for(type(model))
    model.train()(**batch).loss.backward()
    learned = model.encoder.stack.blocks[0].attention.subquad.bound.learned
    assert all(parameter.grad.any() for parameter in learned.parameters())
    model.eval().save_pretrained(tmp_path)
    assert torch.equal(type(model).from_pretrained(tmp_path)(**batch).logits, model(**batch).logits)


# ---------------------------------------------------------------------- steps, bad input


@pytest.mark.parametrize("logits", ["random-and-dot", "dense"])
def test_a_step_of_a_layer_equals_the_row_of_the_whole(logits):
    layer = sq.nn.MultiheadAttention(12, 2, method=f"synthesizer:logits={logits}", max_length=30)
    x = normal(2, 20, 12)
    whole = layer(x, is_causal=True)
    for t in (0, 7, 19):
        step = layer(x[:, t : t + 1], x[:, : t + 1], mask=Mask.causal(offset=t))
        torch.testing.assert_close(step, whole[:, t : t + 1])


def test_shares_start_equal_and_sum_to_one():
    bound = sq.Synthesizer(logits="random-and-dot").bind(heads=2, head_dim=8, max_length=30)
    q, k, v = qkv(20)
    mean = 0.5 * bound.learned.kinds["random"].logits[:, :20, :20] + 0.5 * (q @ k.mT) * 8**-0.5
    torch.testing.assert_close(bound(q, k, v), mean.softmax(-1) @ v)


def test_the_start_comes_from_the_seed_alone():
    state = torch.get_rng_state()
    a, b, c = (sq.Synthesizer(seed=seed).bind(heads=2, head_dim=8, max_length=30).state_dict() for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    for name in a:
        assert torch.equal(a[name], b[name])
        assert not torch.equal(a[name], c[name])


def test_without_the_input_it_is_refused_with_the_remedy():
    q, k, v = qkv(20)
    with pytest.raises(ValueError, match=r"'synthesizer' .* reads the layer's input .*sq\.nn\.MultiheadAttention"):
        sq.attention(q, k, v, method="synthesizer:logits=dense")
    bound = sq.Synthesizer(logits="dense").bind(heads=2, head_dim=8, max_length=30)
    with pytest.raises(ValueError, match=r"reads the layer's input .* call the bound method with hidden=…, \(2, 20"):
        bound(q, k, v)
    with pytest.raises(ValueError, match=r"`hidden` is \(2, 19, 16\) but `query` is \(2, 2, 20, 8\)"):
        bound(q, k, v, hidden=normal(2, 19, 16))
    with pytest.raises(ValueError, match=r"`hidden` is 15 wide.* 16 wide"):
        bound(q, k, v, hidden=normal(2, 20, 15))


def test_transformers_models_refuse_dense_logits_by_name_and_take_random_ones():
    case = build("bert")
    with pytest.raises(ValueError, match=r"'synthesizer' reads the layer's input .* sq\.nn.MultiheadAttention"):
        sq.hf.swap(case.model, "synthesizer:logits=dense-and-dot")
    sq.hf.swap(case.model, "synthesizer:logits=random-and-dot")
    assert case.output().isfinite().all()


def test_parts_of_the_heads_cannot_read_it():
    with pytest.raises(ValueError, match="'synthesizer:logits=dense' reads the layer's input for all heads"):
        sq.MixedHeads("local+synthesizer:logits=dense")
    assert sq.MixedHeads("local+synthesizer").traits.synthetic


@pytest.mark.parametrize(("text", "message"), [
    ("logits=dense-and-random", "logits='dense-and-random', but it must be one of 'random', 'factorised-random'"),
    ("rank=0", "rank=0, but it must be a whole number ≥ 1"),
])  # fmt: skip
def test_impossible_settings_are_refused(text, message):
    with pytest.raises(ValueError, match=f"'synthesizer': {message}"):
        sq.parse_method(f"synthesizer:{text}")


def test_the_longest_input_must_be_known_and_not_exceeded():
    with pytest.raises(ValueError, match=r"'synthesizer' learns a logit for each position.*max_length"):
        sq.nn.MultiheadAttention(12, 2, method="synthesizer")
    layer = sq.nn.MultiheadAttention(12, 2, method="synthesizer", max_length=8)
    with pytest.raises(ValueError, match=r"bound for at most 8 tokens \(max_length\), but there are 9 keys"):
        layer(normal(1, 9, 12))
