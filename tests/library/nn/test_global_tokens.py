"""Projections of their own for the global tokens of a layer."""

import pytest
import torch
from torch import Tensor

import subquad as sq
from subquad.testing.oracle import normal

N = 20
SEGMENTS = torch.tensor([[0] * 8 + [1] * 12, [0] * 11 + [1] * 9])
# How a layer is called, and which of item 1's tokens are global beside the first two that are real.
CALLS = {
    "plain": ({}, [0, 1]),
    "padding": ({"mask": sq.Mask.padding(torch.arange(N) >= torch.tensor([[0], [4]]))}, [4, 5]),
    "torch's padding": ({"key_padding_mask": torch.arange(N) < torch.tensor([[0], [4]])}, [4, 5]),
    "causal": ({"is_causal": True}, [0, 1]),
    "segments": ({"mask": sq.Mask.segments(SEGMENTS)}, [0, 1, 11, 12]),
    "kept": ({"keep": [7, -1]}, [0, 1, 7, 19]),
    "a first token that is kept": ({"keep": [0]}, [0, 1, 2]),
    "kept among padding": (
        {"mask": sq.Mask.padding(torch.arange(N) < torch.tensor([[20], [9]])), "keep": [7, 15]},
        [0, 1, 7],
    ),
    "memory": ({"is_causal": True, "memory": normal(2, 5, 12, seed=3)}, []),
    "fewer key heads": ({"kv_heads": 1}, [0, 1]),
}


def pair(kv_heads: int = 2, method: str = "longformer:window=2,first=2") -> tuple[sq.nn.MultiheadAttention, ...]:
    """A layer with projections for global tokens, and one without, with the same other weights."""
    torch.manual_seed(0)
    own = sq.nn.MultiheadAttention(12, 2, kv_heads=kv_heads, method=method, global_projections=True)
    shared = sq.nn.MultiheadAttention(12, 2, kv_heads=kv_heads, method=method)
    shared.load_state_dict({name: w for name, w in own.state_dict().items() if "global_tokens" not in name})
    return own, shared


@pytest.mark.parametrize("name", CALLS)
def test_the_rows_of_global_tokens_alone_come_from_their_projections(name):
    how, of_global = dict(CALLS[name][0]), CALLS[name][1]
    own, shared = pair(how.pop("kv_heads", 2))
    x = normal(2, N, 12)
    torch.testing.assert_close(own(x, **how), shared(x, **how))  # they start as copies
    for project in own.global_tokens.children():
        project.weight.data.add_(1.0)
    changed = ((own(x, **how) - shared(x, **how)).abs().amax(-1) > 1e-4)[1]
    assert changed.nonzero().flatten().tolist() == of_global


def test_a_global_row_is_exact_attention_with_its_projections():
    own, _ = pair()
    for number, project in enumerate(own.global_tokens.children()):
        project.weight.data = normal(12, 12, seed=number)
    x = normal(2, N, 12)

    def heads(project: torch.nn.Linear) -> Tensor:
        return project(x).unflatten(-1, (2, 6)).transpose(1, 2)

    exact = sq.attention(*(heads(project) for project in own.global_tokens.children()), method="full")
    wanted = own.out_proj(exact.transpose(1, 2).flatten(2))
    torch.testing.assert_close(own(x)[:, :2], wanted[:, :2])


def test_every_projection_gets_a_gradient():
    own, _ = pair()
    own(normal(2, N, 12)).square().sum().backward()
    assert all(
        p.grad is not None and p.grad.abs().sum() > 0 for name, p in own.named_parameters() if "k_proj.b" not in name
    )


def test_with_no_global_token_they_change_nothing():
    own, shared = pair(method="longformer:window=2,first=0")
    own.global_tokens.q_proj.weight.data.add_(1.0)
    x = normal(2, N, 12)
    torch.testing.assert_close(own(x), shared(x))


@pytest.mark.parametrize("method", ["local", "mixed-heads:methods=longformer+local"])
def test_methods_without_global_tokens_are_refused(method):
    name = method.partition(":")[0]
    with pytest.raises(ValueError, match=f"global_projections=True, but '{name}' has no global tokens.*'longformer'"):
        sq.nn.MultiheadAttention(12, 2, method=method, global_projections=True)
