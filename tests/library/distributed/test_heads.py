"""Some of the heads of a layer, without other processes: they give what they give beside the others."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import subquad as sq
from subquad.distributed.head_exchange import of_rank
from subquad.methods.core.learned_heads import some_heads, state_of_heads, undeclared
from subquad.testing.oracle import normal

HEADS, TOKENS, WIDTH = 5, 37, 4


def example(name: str) -> sq.Method:
    """The method with the settings of its example."""
    return type(sq.parse_method(name))(**sq.parse_method(name).traits.example)


@pytest.mark.parametrize("name", sq.list_methods())
@pytest.mark.parametrize("kv_heads", [5, pytest.param(1, marks=pytest.mark.long)])
def test_heads_give_what_they_give_beside_the_others(name: str, kv_heads: int):
    method, heads = example(name), 4 if name == "mixed-heads" else HEADS
    if name == "mixed-heads" and kv_heads == 1:
        pytest.skip("it does not divide the query heads of a key head")
    kv_heads = min(kv_heads, heads)
    learned = method.make_learned(heads, kv_heads, WIDTH, TOKENS)
    if learned is not None:
        learned.eval()
        with torch.no_grad():
            for seed, x in enumerate(learned.parameters()):
                x += 0.1 * normal(x.numel(), 1, 1, 1, seed=seed).view(x.shape)
    q = normal(2, heads, TOKENS, WIDTH)
    k, v = (normal(2, kv_heads, TOKENS, WIDTH, seed=seed) for seed in (1, 2))
    how = {"hidden": normal(2, TOKENS, heads * WIDTH)} if method.traits.needs_hidden else {}
    q, k, v, call = method.prepare(q, k, v, enable_gqa=True, learned=learned, **how)
    want, _ = method.attend_partial(q, k, v, call)

    own = of_rank(1, 3, heads, kv_heads)
    inside = replace(call, heads=own, learned=None if learned is None else method.of_heads(learned, own))
    have, _ = method.attend_partial(q[:, own.queries], k[:, list(own.keys)], v[:, list(own.keys)], inside)
    torch.testing.assert_close(have, want[:, own.queries], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", [name for name in sq.list_methods() if sq.parse_method(name).traits.learned])
def test_every_parameter_says_which_heads_it_is_of(name: str):
    learned = example(name).make_learned(HEADS if name != "mixed-heads" else 4, 1 if name != "mixed-heads" else 4, 4, 9)
    assert learned is not None
    assert undeclared(learned) is None


def test_a_parameter_that_does_not_say_it_is_named():
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)

    assert undeclared(Own()) == "inner.weight"
    assert undeclared(nn.ModuleDict({"0": nn.Linear(3, 3)})) == "0.weight"


def test_gradients_of_some_heads_are_those_of_the_whole_parameters():
    whole = sq.parse_method("lha:buckets=3,hidden=2").make_learned(5, 5, WIDTH, None)
    own = some_heads(whole, of_rank(1, 3, 5, 5))
    own.query.weights[0].sum().backward()
    assert whole.query.weights[0].grad[:, 0, 0].tolist() == [0, 0, 1, 1, 0]
    assert len(own.key.biases[1]) == 2
    assert state_of_heads(whole) is None
    assert state_of_heads(sq.parse_method("routing").make_learned(5, 5, WIDTH, None)) == "centroids"
