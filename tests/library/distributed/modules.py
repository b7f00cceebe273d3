"""Layers of `sq.nn` and of torch on split sequences."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import subquad as sq
from subquad.testing.oracle import normal
from tests.library.distributed.compared import TOKENS, of_parameters, split, taken, worst

WIDTH, HEADS = 16, 4


def of_module(
    layer: nn.Module,
    run: Callable[[nn.Module, Tensor, sq.distributed.Sequence | None], Tensor],
    of: sq.distributed.Sequence,
    valid: Tensor | None = None,
) -> float:
    """The worst difference of outputs and gradients; `run` runs the layer on all tokens, or on a rank's, in its own
    way."""
    x, g = normal(2, TOKENS, WIDTH), normal(2, TOKENS, WIDTH, seed=1)
    g = g if valid is None else g * valid[..., None]
    alone = copy.deepcopy(layer)
    inputs = x.clone().requires_grad_(), of.shard(x).clone().requires_grad_()
    want, have = run(alone, inputs[0], None), run(layer, inputs[1], of)
    (want * g).sum().backward()
    (have * of.shard(g)).sum().backward()
    valid = torch.ones(2, TOKENS, dtype=torch.bool) if valid is None else valid
    own = of.shard(valid)
    pairs = [(of.shard(want)[own], have[own])] if own.any() else []
    return worst(pairs, [(of.shard(inputs[0].grad), inputs[1].grad), *of_parameters(taken(alone), layer)])


def mha(method: str, **given: Any) -> sq.nn.MultiheadAttention:
    torch.manual_seed(0)
    return sq.nn.MultiheadAttention(WIDTH, HEADS, method=method, **given)


def self_attention() -> float:
    def run(layer: nn.Module, x: Tensor, of: Any) -> Tensor:
        return layer(x, is_causal=True, parallel=of)

    return of_module(mha("performer:features=16", kv_heads=2), run, split(TOKENS, uneven=True))


def padded_as_torch() -> float:
    valid = torch.arange(TOKENS) < torch.tensor([TOKENS, 9])[:, None]  # the first of several ranks has no padding

    def run(layer: nn.Module, x: Tensor, of: Any) -> Tensor:
        hidden = ~valid if of is None else ~of.shard(valid)
        return layer(x, key_padding_mask=hidden, parallel=of)

    return of_module(mha("i-clustered:clusters=5,topk=3"), run, split(TOKENS), valid)


def tokens_first() -> float:
    def run(layer: nn.Module, x: Tensor, of: Any) -> Tensor:
        return layer(x.transpose(0, 1), parallel=of).transpose(0, 1)

    return of_module(mha("full", batch_first=False), run, split(TOKENS, mode="heads"))


def cross_attention() -> float:
    y = normal(2, 9, WIDTH, seed=5)
    of_keys = split(TOKENS, keys=9)

    def run(layer: nn.Module, x: Tensor, of: Any) -> Tensor:
        return layer(x, y if of is None else sq.distributed.Sequence(of.key_lengths).shard(y), parallel=of)

    return of_module(mha("linear"), run, of_keys)


def rotary() -> float:
    def run(layer: nn.Module, x: Tensor, of: Any) -> Tensor:
        at = torch.arange(TOKENS) if of is None else of.positions()
        angle = at[:, None] / 100 ** (torch.arange(WIDTH) / WIDTH)
        return layer(x * angle.cos() + x.roll(1, -1) * angle.sin(), parallel=of)

    return of_module(mha("linear"), run, split(TOKENS))


def torch_encoder() -> float:
    torch.manual_seed(0)
    one = nn.TransformerEncoderLayer(WIDTH, HEADS, 24, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(one, 2)
    sq.nn.swap(encoder, "local:window=3")

    def run(model: nn.Module, x: Tensor, of: Any) -> Tensor:
        with sq.distributed.use(of):
            return model(x, is_causal=True)

    return of_module(encoder, run, split(TOKENS, uneven=True))


def torch_decoder() -> float:
    torch.manual_seed(0)
    decoder = nn.TransformerDecoderLayer(WIDTH, HEADS, 24, dropout=0.0, batch_first=True)
    sq.nn.swap(decoder, {"self_attn": "linear", "multihead_attn": "performer:features=16"})
    memory, of_both = normal(2, 9, WIDTH, seed=5), split(TOKENS, keys=9)

    def run(model: nn.Module, x: Tensor, of: Any) -> Tensor:
        seen = memory if of is None else sq.distributed.Sequence(of.key_lengths).shard(memory)
        with sq.distributed.use(of):
            return model(x, seen, tgt_is_causal=True)

    return of_module(decoder, run, of_both)


def nested_blocks() -> float:
    """An inner block of other tokens, and a part that runs on whole tensors."""
    other = split(9)
    y = normal(2, 9, WIDTH, seed=5)

    def run(layer: nn.Module, x: Tensor, of: Any) -> Tensor:
        with sq.distributed.use(of):
            with sq.distributed.use(None if of is None else other):
                seen = layer(y if of is None else other.shard(y))
            with sq.distributed.use(None):
                alike = layer(y)
            mean = (seen if of is None else other.unshard(seen)).mean(1, keepdim=True) + alike.mean(1, keepdim=True)
            return layer(x) + mean

    return of_module(mha("linear"), run, split(TOKENS))


def checkpointed() -> float:
    def run(layer: nn.Module, x: Tensor, of: Any) -> Tensor:
        return torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)

    layer, of, g = mha("performer:features=16"), split(TOKENS), normal(2, TOKENS, WIDTH, seed=1)
    x = normal(2, TOKENS, WIDTH)
    alone = copy.deepcopy(layer)
    (alone(x) * g).sum().backward()
    with sq.distributed.use(of):
        (run(layer, of.shard(x), of) * of.shard(g)).sum().backward()
    return worst([], of_parameters(taken(alone), layer))


def compiled() -> float:
    """The method is left out of the graphs, of which there are those before it and after it."""
    return max(map(compiled_layer, ("linear", "i-clustered:clusters=5,topk=3")))


def compiled_layer(method: str) -> float:
    graphs: list[Any] = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    def run(layer: nn.Module, x: Tensor, of: Any) -> Tensor:
        return torch.compile(layer, backend=count)(x, parallel=of) if of is not None else layer(x)

    far = of_module(mha(method), run, split(TOKENS))
    assert len(graphs) == 2, f"{method}: {len(graphs)} graphs"
    return far


def global_projections(keep: Callable[[Any], Any] = lambda of: None, in_block: bool = False) -> float:
    layer = mha("longformer:window=4,first=2", global_projections=True)
    for number, weight in enumerate(layer.global_tokens.parameters()):
        weight.data += 0.3 * normal(*weight.shape, seed=number)

    def run(layer: nn.Module, x: Tensor, of: Any) -> Tensor:
        with sq.distributed.use(of if in_block else None):
            return layer(x, keep=keep(of), parallel=None if in_block else of)

    return of_module(layer, run, split(TOKENS))


def global_projections_in_a_block() -> float:
    return global_projections(in_block=True)


def global_projections_and_kept_tokens() -> float:
    """By their numbers, of which a rank has none, and by bools, of which no rank but the last names a token."""
    named = torch.arange(TOKENS).expand(2, -1) == TOKENS - 2
    ways: list[Callable[[Any], Any]] = [
        lambda of: [0],
        lambda of: [0, TOKENS - 2],
        lambda of: named if of is None else of.shard(named),
        lambda of: torch.zeros(2, TOKENS if of is None else of.lengths[of.rank], dtype=torch.bool),
    ]
    return max(global_projections(way, in_block) for way in ways for in_block in (False, True))


MODULES = (
    self_attention, padded_as_torch, tokens_first, cross_attention, rotary, torch_encoder, torch_decoder, nested_blocks,
    checkpointed, compiled, global_projections, global_projections_in_a_block, global_projections_and_kept_tokens,
)  # fmt: skip
