"""Helpers for tests of hash methods: bound methods, hash functions written out, planted groups, padded copies."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import subquad as sq
from subquad import Mask
from subquad.kernels.selection.hash_functions import HashFunctions
from subquad.testing.contract import lengths_to_bool, pad
from subquad.testing.oracle import normal

GROUPS, EACH, WIDTH, SCALE = 4, 16, 16, 3.0
LENGTHS = (19, 12, 5, 1, 0)


def bound(
    text: str, *, heads: int = 2, kv_heads: int | None = None, width: int = 8, longest: int = 64
) -> sq.BoundMethod:
    """In training mode, with biases that are not 0."""
    made = sq.parse_method(text).bind(heads=heads, kv_heads=kv_heads, head_dim=width, max_length=longest)
    for number, (name, parameter) in enumerate(made.named_parameters()):
        if "biases" in name:
            parameter.data = 0.3 * normal(*parameter.shape, seed=60 + number)
    return made.train()


def loss_of(layer: sq.BoundMethod, query: Tensor, key: Tensor, **options: object) -> Tensor:
    """The auxiliary loss of one call."""
    layer(query, key, key, **options)
    return layer.auxiliary_loss()


def by_hand(functions: HashFunctions, side: str, head: int, x: Tensor) -> Tensor:
    """H(x) of one head, (n, D) to (n, B)."""
    function = getattr(functions, side)
    for layer, (weight, bias) in enumerate(zip(function.weights, function.biases, strict=True)):
        x = (x.clamp(min=0) if layer else x) @ weight[head].to(x.dtype) + bias[head].to(x.dtype)
    return x


def divergence_by_hand(target: Tensor, logits: Tensor) -> Tensor:
    """KL(target ‖ softmax logits) of two vectors."""
    p = target / target.sum()
    return sum(a * (a.log() - b) for a, b in zip(p, logits.log_softmax(-1), strict=True) if a > 0)


def padded_batch(side: str, filler: float, heads: int = 2, width: int = 24) -> tuple[Tensor, Tensor, Tensor]:
    """Items of LENGTHS tokens, noise of size `filler` around them: query, key, and which tokens are real."""
    items = [tuple(normal(1, heads, max(n, 1), 8, seed=2 * n + i) for i in range(2)) for n in LENGTHS]
    valid = lengths_to_bool(LENGTHS, width, side)
    return *pad(items, valid, filler), valid


def in_every_padding(layer: sq.BoundMethod, causal: bool = False) -> list[list[Tensor]]:
    """The loss and its gradients of the same items, padded to either side, by more or less, with other content."""
    found = []
    for side, filler, width in (("right", 1.0, 19), ("left", 300.0, 24), ("right", 30.0, 40)):
        query, key, valid = padded_batch(side, filler, width=width)
        loss = loss_of(layer, query, key, mask=mask_of(valid, causal))
        found.append([loss, *torch.autograd.grad(loss, list(layer.parameters()))])
    return found


def packed_and_apart(layer: sq.BoundMethod) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of items as the segments of one, as a batch, and that of a packed item without segments."""
    query, key, valid = padded_batch("right", 1.0)
    packed = [x.transpose(1, 2)[valid][None].transpose(1, 2) for x in (query, key)]
    ids = torch.arange(len(valid)).repeat_interleave(valid.sum(1))[None]
    together = loss_of(layer, *packed, mask=Mask.segments(ids))
    none = loss_of(layer, *packed, mask=Mask.segments(torch.full_like(ids, -1)))
    return together, loss_of(layer, query, key, mask=Mask.padding(valid)), none


def separate_gradients(layer: sq.BoundMethod, inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Check that output and loss have gradients to nothing in common, and return those of the loss."""
    inputs = [x.requires_grad_() for x in inputs]
    out, loss = layer(*inputs), layer.auxiliary_loss()
    names, parameters = zip(*layer.named_parameters(), strict=True)
    assert not any(torch.autograd.grad(out.sum(), parameters, allow_unused=True, retain_graph=True))
    assert all(grad.abs().max() > 0 for grad in torch.autograd.grad(out.square().sum(), inputs))
    assert torch.autograd.grad(loss, inputs, allow_unused=True, retain_graph=True) == (None,) * 3
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def mask_of(valid: Tensor, causal: bool = False) -> Mask:
    return Mask.padding(valid) & Mask(is_causal=causal)


@dataclass(frozen=True)
class Planted:
    """Groups of tokens that attend to each other, though a group's queries and keys point in different directions."""

    query: Tensor
    key: Tensor


def planted(seed: int, heads: int) -> Planted:
    """Two items. The common part of a group's queries and keys is small beside a part that only either side has."""
    order = torch.stack([normal(GROUPS * EACH, seed=100 * seed + item).argsort() for item in range(2)])
    group = F.one_hot((torch.arange(GROUPS * EACH) % GROUPS)[order], GROUPS).float()
    none = torch.zeros_like(group)
    query = torch.cat([2 * group, 5 * group, none, none], dim=-1)
    key = torch.cat([2 * group, none, 5 * group.roll(1, -1), none], dim=-1)
    turn = torch.linalg.qr(normal(WIDTH, WIDTH, seed=9)).Q
    noisy = ((x + 0.1 * normal(*x.shape, seed=seed + 7 * i)) @ turn for i, x in enumerate((query, key)))
    return Planted(*(x[:, None].expand(-1, heads, -1, -1) for x in noisy))


def fitted(layer: sq.BoundMethod, heads: int, steps: int, learning_rate: float) -> sq.BoundMethod:
    """After some steps of Adam on other tokens of the same groups than those of seed 0."""
    optimiser = torch.optim.Adam(layer.parameters(), lr=learning_rate)
    batches = [planted(seed, heads) for seed in range(1, 5)]
    for step in range(steps):
        batch = batches[step % len(batches)]
        loss = loss_of(layer, batch.query, batch.key, scale=SCALE)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return layer.eval()
