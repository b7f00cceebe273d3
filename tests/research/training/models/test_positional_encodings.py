"""Positions: what each kind adds, and where."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

import subquad as sq
from subquad.research.training.models import EncoderConfig, MaskedSymbolEncoder
from subquad.research.training.models.configuration import POSITIONS
from subquad.research.training.models.positional_encodings import rotate, sinusoid
from subquad.tools.measure.capture import recorded
from tests.research.training.models.build import build, symbols

RELATIVE = "local:window=3,positions=relative"
MIXED = f"mixed-heads:methods={RELATIVE.replace(',', ';')}+full"


def heads(seed, N=12, D=8):
    return torch.randn(2, 3, N, D, generator=torch.Generator().manual_seed(seed))


def counted(first=0, N=12):
    return torch.arange(first, first + N).expand(2, N)


# ---------------------------------------------------------------------- formulas


def test_sinusoids_are_those_of_the_formula():
    have = sinusoid(counted(), 6)[0]
    for p in (0, 1, 11):
        for i in range(3):
            angle = torch.tensor(p * 10_000.0 ** (-2 * i / 6))
            torch.testing.assert_close(have[p, i], angle.sin())
            torch.testing.assert_close(have[p, 3 + i], angle.cos())
    assert sinusoid(counted(), 7).shape == (2, 12, 7)


def test_rotated_products_depend_on_distances_alone():
    query, key = heads(0), heads(1)
    here = rotate(query, counted()) @ rotate(key, counted()).mT
    there = rotate(query, counted(100)) @ rotate(key, counted(100)).mT
    torch.testing.assert_close(there, here, atol=1e-4, rtol=1e-4)
    apart = rotate(query, counted(100)) @ rotate(key, counted(99)).mT
    assert (apart - here).abs().max() > 0.1
    torch.testing.assert_close(rotate(query, counted()).norm(dim=-1), query.norm(dim=-1))


def test_rotation_is_that_of_transformers():
    query, key = heads(0), heads(1)
    table = LlamaRotaryEmbedding(LlamaConfig(hidden_size=24, num_attention_heads=3, head_dim=8))
    want = apply_rotary_pos_emb(query, key, *table(query, counted(5)))
    torch.testing.assert_close(rotate(query, counted(5)), want[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(rotate(key, counted(5)), want[1], atol=1e-5, rtol=1e-5)


# ---------------------------------------------------------------------- in a model


@pytest.mark.parametrize("positions", POSITIONS)
def test_order_matters_by_positions_alone(positions):
    model, ids = build(MaskedSymbolEncoder, positions=positions), symbols()
    turned = model(ids.flip(1)).logits.flip(1)
    change = (turned - model(ids).logits).abs().max()
    assert change < 1e-5 if positions == "none" else change > 1e-2


@pytest.mark.parametrize(("positions", "added"), [("rotary", rotate), ("layer-sinusoidal", None)])
def test_queries_and_keys_of_every_layer_get_them(positions, added):
    model, ids = build(positions=positions, num_attention_heads=4, num_key_value_heads=2), symbols()
    with recorded(model) as calls:
        model(ids)
    inputs = _inputs_of_attention(model, ids)
    for call, hidden in zip(calls, inputs, strict=True):
        attention = model.encoder.stack.blocks[call.number].attention
        for x, project, placed in ((call.query, attention.q_proj, True), (call.key, attention.k_proj, True),
                                   (call.value, attention.v_proj, False)):  # fmt: skip
            plain = project(hidden).unflatten(-1, (-1, 4)).transpose(1, 2)
            where = torch.arange(20).expand(2, 20)
            want = plain if not placed else added(plain, where) if added else plain + sinusoid(where, 4)[:, None]
            torch.testing.assert_close(x, want)


def _inputs_of_attention(model, ids):
    """The normed hidden states that each block's attention reads."""
    found = []
    handles = [
        block.norm.register_forward_hook(lambda *args: found.append(args[2])) for block in model.encoder.stack.blocks
    ]
    model(ids)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("positions", ["rotary", "layer-sinusoidal"])
def test_heads_with_relative_positions_get_no_others(positions):
    with_, without = build(method=RELATIVE, positions=positions), build(method=RELATIVE, positions="none")
    assert torch.equal(with_(symbols()).logits, without(symbols()).logits)
    config = EncoderConfig(method=MIXED, positions=positions, num_attention_heads=4, hidden_size=16)
    assert config.absolute_heads(0) == [False, False, True, True]
    model, ids = build(method=MIXED, positions=positions, num_attention_heads=4, num_key_value_heads=2), symbols()
    plain = build(method=MIXED, positions="none", num_attention_heads=4, num_key_value_heads=2)
    with recorded(model) as calls:
        model(ids)
    with recorded(plain) as others:
        plain(ids)
    same = [torch.equal(a, b) for a, b in zip(calls[0].query[0], others[0].query[0], strict=True)]
    assert same == [True, True, False, False]
    assert [torch.equal(a, b) for a, b in zip(calls[0].key[0], others[0].key[0], strict=True)] == [True, False]


def test_relative_positions_may_be_in_one_layer_alone():
    config = EncoderConfig(method=[RELATIVE, "full"], num_hidden_layers=2)
    assert not any(config.absolute_heads(0))
    assert all(config.absolute_heads(1))


# ---------------------------------------------------------------------- how far they reach


def test_learned_positions_end_and_can_be_extended(tmp_path):
    model = build(positions="learned")
    with pytest.raises(ValueError, match=r"49.*48"):
        model(symbols(length=49))
    assert sq.hf.position_limit(model) == 48
    short = model(symbols()).logits
    sq.hf.extend_positions(model, 60, mode="tile")
    assert torch.equal(model(symbols()).logits, short)
    long = model(symbols(length=60)).logits
    model.save_pretrained(tmp_path)
    assert torch.equal(type(model).from_pretrained(tmp_path)(symbols(length=60)).logits, long)
    with pytest.raises(ValueError, match=r"61.*60"):
        model(symbols(length=61))


@pytest.mark.parametrize("positions", ["sinusoidal", "layer-sinusoidal", "rotary", "none"])
def test_other_positions_do_not_end(positions):
    model = build(positions=positions)
    assert sq.hf.position_limit(model) is None
    assert model(symbols(length=100)).logits.isfinite().all()
