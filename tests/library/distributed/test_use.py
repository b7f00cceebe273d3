"""`sq.distributed.use` and what it refuses, on one rank, which needs no other processes."""

from typing import Any

import pytest
import torch
from torch import nn

import subquad as sq
from subquad.methods.core import current_shard as current
from subquad.testing.oracle import normal, qkv

TOKENS = 9


@pytest.fixture
def of(alone: None) -> sq.distributed.Sequence:
    return sq.distributed.Sequence.even(TOKENS)


def layer(method: str = "linear") -> sq.nn.MultiheadAttention:
    return sq.nn.MultiheadAttention(8, 2, method=method)


def test_calls_inside_the_block_run_on_its_sequence(of: sq.distributed.Sequence):
    q, k, v = qkv(TOKENS)
    shorter = sq.distributed.Sequence.even(4)
    calls: Any = {
        "function": lambda: sq.attention(q, k, v, method="linear"),
        "method": lambda: sq.parse_method("linear")(q, k, v),
        "layer": lambda: layer()(normal(1, TOKENS, 8)),
        "swapped": lambda: swapped()(normal(1, TOKENS, 8)),
    }
    for call in calls.values():
        with sq.distributed.use(shorter):
            with pytest.raises(ValueError, match="has 9 positions on rank 0, but its share of the sequence is 4"):
                call()
            with sq.distributed.use(of), sq.distributed.traffic() as sent:
                call()
            assert sent.calls > 0
            with sq.distributed.use(None), sq.distributed.traffic() as sent:
                call()
            assert sent.calls == 0
    with sq.distributed.use(shorter):
        assert sq.attention(q, k, v, method="linear", parallel=of).shape == v.shape


def swapped() -> nn.Module:
    encoder = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True).eval()
    sq.nn.swap(encoder, "full")
    return encoder


def test_self_attention_of_layers_leaves_the_keys_of_a_sequence_out(alone: None):
    of = sq.distributed.Sequence.even(TOKENS, keys=4)
    x, y = normal(1, TOKENS, 8), normal(1, 4, 8)
    with sq.distributed.use(of):
        assert torch.allclose(layer().eval()(x), layer().eval()(x)) is False  # other parameters: it runs
        assert layer()(x, y).shape == x.shape
        q, k, v = qkv(TOKENS)
        with pytest.raises(ValueError, match="`key` has 9 positions on rank 0, but its share of the sequence is 4"):
            sq.attention(q, k, v, method="linear")


def test_what_would_see_one_rank_alone_is_refused(of: sq.distributed.Sequence):
    x = normal(1, TOKENS, 8)
    q, k, v = qkv(TOKENS)
    torchs = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True).eval()
    nested = torch.nested.as_nested_tensor([x[0], x[0, :3]], layout=torch.jagged)

    def intercepted() -> None:
        with sq.intercept("linear"):
            nn.functional.scaled_dot_product_attention(q, k, v)

    refused: list[tuple[Any, str]] = [
        (lambda: nn.functional.scaled_dot_product_attention(q, k, v), "torch's own scaled_dot_product_attention"),
        (lambda: torchs(x), "torch's own multi_head_attention_forward"),
        (intercepted, "sq.intercept is not supported with"),
        (lambda: sq.nn.SetAttention(8, 2)(x), "a layer for sets"),
        (lambda: sq.nn.PoolingByAttention(8, 2)(x), "a layer for sets"),
        (lambda: sq.nn.SetTransformer(8, 3, width=8, heads=2, points=2)(x), "a layer for sets"),
        (lambda: layer()(x, memory=x), "`memory` is not supported with `parallel`"),
        (
            lambda: layer()(x, attn_mask=torch.ones(TOKENS, TOKENS).bool()),
            "`attn_mask` .* not supported with",
        ),
        (lambda: layer()(nested), "nested tensors are not supported with `parallel`"),
        (lambda: layer().step(x, layer().init_state(1)), "a step is not supported with"),
        (lambda: audited()(x), "sq.audit is not supported with `parallel`"),
    ]
    for call, message in refused:
        with sq.distributed.use(of), pytest.raises(ValueError, match=message):
            call()
        with sq.distributed.use(of), sq.distributed.use(None):
            if message.startswith(("torch's own", "a layer for sets")):
                call()
    with pytest.raises(TypeError, match="Sequence"):
        sq.distributed.use(3).__enter__()  # type: ignore[arg-type]


def audited() -> nn.Module:
    made = layer()
    made.attention.watch = object()
    return made


def test_a_backward_pass_after_the_block_is_refused(of: sq.distributed.Sequence, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(current, "_state", current._State())
    x, made = normal(1, TOKENS, 8).requires_grad_(), layer()
    with sq.distributed.use(of):
        out = torch.utils.checkpoint.checkpoint(made, x, use_reentrant=False)
    with pytest.raises(RuntimeError, match=r"call backward\(\) inside it"):
        out.sum().backward()
    alone = torch.utils.checkpoint.checkpoint(made, x, use_reentrant=False)
    with sq.distributed.use(None):
        alone.sum().backward()
    assert x.grad is not None


def test_ranks_know_their_sequences(alone: None):
    ranks = sq.distributed.Ranks()
    assert ranks.sequence([4]) is ranks.sequence((4,))
    assert ranks.sequence([4]).positions().tolist() == [0, 1, 2, 3]
    assert ranks.gathered(torch.tensor([3, 5])).tolist() == [[3, 5]]
    with pytest.raises(ValueError, match="mode='all', but it must be one of"):
        sq.distributed.Ranks(mode="all")


@pytest.mark.parametrize("method", ["i-clustered:clusters=3,topk=2", "clustered-tail", "linear", "local:window=2"])
def test_a_method_on_ranks_is_left_out_of_compiled_graphs(alone: None, unchecked: None, method: str):
    graphs: list[Any] = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    of, x, made = sq.distributed.Sequence.even(TOKENS), normal(1, TOKENS, 8).requires_grad_(), layer(method)

    def attention(x: torch.Tensor) -> torch.Tensor:
        heads = x.unflatten(2, (2, 4)).transpose(1, 2)
        return sq.attention(heads, heads, heads, method=method, parallel=of).exp()

    for run in (lambda x: made(x, parallel=of).exp(), attention):
        torch._dynamo.reset()
        graphs.clear()
        out = torch.compile(run, backend=count)(x)
        assert torch.equal(out, run(x))
        (gradient,) = torch.autograd.grad(out.sum(), x)
        assert gradient.isfinite().all()
        assert len(graphs) <= 3  # before the method, and after it


@pytest.mark.parametrize("mode", ["summary", "heads"])
def test_second_derivatives_are_refused(alone: None, mode: str):
    q, k, v = (x.requires_grad_() for x in qkv(TOKENS))
    out = sq.attention(q, k, v, method="linear", parallel=sq.distributed.Sequence.even(TOKENS, mode=mode))
    with pytest.raises(RuntimeError, match="no second derivative; leave create_graph=True out"):
        torch.autograd.grad(out.sum(), k, create_graph=True)
    assert torch.autograd.grad(out.sum(), k)[0].isfinite().all()


def test_groups_and_lengths_are_checked(alone: None):
    mesh = torch.distributed.init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "sp"))
    for make in (sq.distributed.Sequence.even, sq.distributed.Sequence, sq.distributed.Ranks):
        given: Any = {} if make is sq.distributed.Ranks else {"tokens": 4} if "even" in str(make) else {"lengths": [4]}
        with pytest.raises(ValueError, match=r"the mesh has 2 dimensions, but .* give mesh\['sp'\]"):
            make(**given, group=mesh)
        with pytest.raises(TypeError, match="the group is a str, but it must be a process group"):
            make(**given, group="sp")
        assert make(**given, group=mesh["sp"]).ranks == 1
    with pytest.raises(ValueError, match=r"lengths=\(4, 5\), but the group has 1 ranks"):
        sq.distributed.Sequence([4, 5])
