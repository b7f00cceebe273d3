"""Exchanges between ranks, with gradients, and a count of what is sent.

Everything but a ring is made of one collective in which each rank sends each other one what is meant for it. Its
backward pass is the same with the roles exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from subquad.distributed.failures import answered
from subquad.distributed.shares import even_shares

Shape = Sequence[int]
MANY = 1 << 18  # bytes


@dataclass
class Traffic:
    """Bytes and messages that this rank sent to others inside `traffic`, backward passes included.

    Attributes:
        bytes: size of the tensors.
        calls: number of collectives.
    """

    bytes: int = 0
    calls: int = 0


_counted: ContextVar[Traffic | None] = ContextVar("subquad_traffic", default=None)


@contextmanager
def traffic() -> Iterator[Traffic]:
    """Count the bytes and messages that this rank sends inside the block.

    A backward pass is counted where it runs in the thread of the block, as on CPUs.
    """
    counted = Traffic()
    token = _counted.set(counted)
    try:
        yield counted
    finally:
        _counted.reset(token)


def exchange(parts: Sequence[Tensor], shapes: Sequence[Shape], group: Any) -> list[Tensor]:
    """Send part p to rank p, and receive a tensor of shape p from rank p, all of one dtype. Differentiable."""
    sent = torch.cat([part.reshape(-1) for part in parts])
    received = _Exchange.apply(sent, [part.numel() for part in parts], [prod(shape) for shape in shapes], group)
    sizes = [prod(shape) for shape in shapes]
    return [part.view(tuple(shape)) for part, shape in zip(received.split(sizes), shapes, strict=True)]


def gather(x: Tensor, shapes: Sequence[Shape], group: Any) -> list[Tensor]:
    """The tensors of all ranks, in their order; x has this rank's shape. Differentiable: ranks' gradients add up."""
    return exchange([x] * len(shapes), shapes, group)


def add(x: Tensor, group: Any) -> Tensor:
    """The sum over all ranks, in their order, so that each has the same bits. Differentiable.

    Ranks send each other what they have: (ranks − 1)·S for S bytes. Of many bytes and ranks, each rank adds up a share
    for all, by two exchanges and 2·S·(ranks − 1)/ranks.
    """
    ranks = dist.get_world_size(group)
    if adds_at_once(x, group):
        total, *others = gather(x, [x.shape] * ranks, group)
        for other in others:
            total = total + other
        return total
    shares = even_shares(x.numel(), ranks)
    local = shares[dist.get_rank(group)]
    total, *others = exchange(x.reshape(-1).split(shares), [(local,)] * ranks, group)
    for other in others:
        total = total + other
    return torch.cat(gather(total, [(share,) for share in shares], group)).view_as(x)


def adds_at_once(x: Tensor, group: Any) -> bool:
    """True if `add` is one exchange: of two ranks, or where the start of another costs more than the bytes."""
    return dist.get_world_size(group) == 2 or x.numel() * x.element_size() < MANY


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sent: Tensor, sizes: list[int], from_each: list[int], group: Any) -> Tensor:
        ctx.sizes, ctx.from_each, ctx.group = sizes, from_each, group
        return all_to_all(sent, sizes, from_each, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        refuse_second_derivative()
        (gradient,) = gradients
        return all_to_all(gradient.contiguous(), ctx.from_each, ctx.sizes, ctx.group), None, None, None


def takes_part(x: Tensor, received: Sequence[Tensor]) -> Tensor:
    """x, as if it depended on what was received: so this rank takes part in the exchange backward, for the others."""
    return _TakesPart.apply(x, *received)


class _TakesPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *received: Tensor) -> Tensor:
        ctx.shapes = [each.shape for each in received]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        (gradient,) = gradients
        return gradient, *(gradient.new_zeros(shape) for shape in ctx.shapes)


def refuse_second_derivative() -> None:
    """RuntimeError in a backward pass that makes a graph: ranks with different graphs would wait for each other."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "attention on several ranks has no second derivative; leave create_graph=True out, or run it on one rank"
        )


def start(
    sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Shape, int]], like: Tensor, group: Any
) -> Callable[[], list[Tensor]]:
    """Start to send tensors to ranks and to receive tensors, of the dtype of `like`, from ranks. Not differentiable.

    What is returned waits until all have come. Messages between two ranks arrive in their order.
    """
    _count(sum(x.numel() for x, _ in sends) * like.element_size(), bool(sends))
    outgoing = [(as_bytes(x), rank) for x, rank in sends]
    incoming = [(like.new_empty(tuple(shape)), rank) for shape, rank in receives]
    ops = [dist.P2POp(dist.isend, x, group=group, group_peer=rank) for x, rank in outgoing]
    ops += [dist.P2POp(dist.irecv, x.view(-1).view(torch.uint8), group=group, group_peer=rank) for x, rank in incoming]
    with answered(group):
        requests = dist.batch_isend_irecv(ops) if ops else []

    def wait() -> list[Tensor]:
        with answered(group):
            for request in requests:
                request.wait()
        outgoing.clear()  # kept until it has arrived
        return [x for x, _ in incoming]

    return wait


def as_bytes(x: Tensor) -> Tensor:
    """The numbers of a tensor, in their order, as bytes."""
    flat = x.reshape(-1)
    # To `contiguous`, one number is contiguous whatever its stride is, which is then too wide for bytes.
    return (flat if flat.stride(0) == 1 else flat.clone(memory_format=torch.contiguous_format)).view(torch.uint8)


def all_to_all(sent: Tensor, sizes: list[int], from_each: list[int], group: Any) -> Tensor:
    """Send parts of these sizes to each rank, and receive parts of others. Not differentiable."""
    rank = dist.get_rank(group)
    # gloo knows fewer dtypes than torch: only numbers of bytes matter here.
    width = sent.element_size()
    _count((sum(sizes) - sizes[rank]) * width, True)
    received = sent.new_empty(sum(from_each))
    out, into = received.view(torch.uint8), sent.view(torch.uint8)
    received_bytes, sent_bytes = ([n * width for n in each] for each in (from_each, sizes))
    with answered(group):
        dist.all_to_all_single(out, into, received_bytes, sent_bytes, group)
    return received


def _count(sent: int, call: bool) -> None:
    counted = _counted.get()
    if counted is not None:
        counted.calls += call
        counted.bytes += sent
