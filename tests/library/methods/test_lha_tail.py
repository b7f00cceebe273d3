"""Tests of what learned hashing with a tail promises: one bucket a query, its loss written out, and a small error."""

import pytest
import torch

import subquad as sq
from subquad import LearnedHashTail, Mask
from subquad.kernels.selection.cells.op import cells_of_keys
from subquad.testing.oracle import gradients, naive, normal, qkv, tracked
from tests.library.methods.dense import with_tail
from tests.library.methods.hashing import (
    SCALE,
    bound,
    by_hand,
    divergence_by_hand,
    fitted,
    in_every_padding,
    loss_of,
    mask_of,
    packed_and_apart,
    padded_batch,
    planted,
    separate_gradients,
)

SETTINGS = ["buckets=4,keys=5,cells=3,hidden=5", "buckets=2,keys=30,cells=2,hash=linear"]


def loss_by_hand(layer: sq.BoundMethod, q, k, scale: float, valid=None) -> torch.Tensor:
    """L_Q, the mean over queries and heads, and L_K, the mean over items and heads, bucket by bucket."""
    method: LearnedHashTail = layer.method
    of_queries, of_keys = [], []
    times = q.shape[1] // k.shape[1]
    for item in range(q.shape[0]):
        here = slice(None) if valid is None else valid[item]
        for head in range(q.shape[1]):
            x, y = q[item, head][here], k[item, head // times][here]
            if len(x) == 0:
                continue
            weights = (scale * x @ y.T).softmax(-1)
            logits = by_hand(layer.learned, "query", head, x * scale**0.5)
            key_logits = by_hand(layer.learned, "key", head // times, y * scale**0.5)
            mass, received = torch.zeros_like(logits), 0.0
            for b in range(method.buckets):
                chosen = key_logits[:, b].sort(descending=True, stable=True).indices[: method.keys]
                mass[:, b] = weights[:, chosen].sum(-1)
                share = (logits.argmax(-1) == b).to(x.dtype)
                share[logits[:, b].sort(descending=True, stable=True).indices[:8]] += 0.25
                received = received + divergence_by_hand(share @ weights, key_logits[:, b])
            of_keys.append(received)
            target = (4 * mass.log()).softmax(-1)
            of_queries += [divergence_by_hand(t, z) for t, z in zip(target, logits, strict=True)]
    return sum(of_queries) / len(of_queries) + sum(of_keys) / len(of_keys)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize(("N", "M"), [(13, 13), (5, 17), (21, 3)])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_the_loss_and_its_gradient_are_those_written_out(settings, N, M, kv_heads):
    layer = bound(f"lha-tail:{settings}", heads=4, kv_heads=kv_heads)
    q, k, _ = qkv(N, M, H=4, G=kv_heads, dtype=torch.float64)
    loss, wanted = loss_of(layer, q, k, scale=0.7), loss_by_hand(layer, q, k, 0.7)
    torch.testing.assert_close(loss, wanted)
    parameters = list(layer.parameters())
    torch.testing.assert_close(
        torch.autograd.grad(loss, parameters), torch.autograd.grad(wanted, parameters), atol=1e-6, rtol=1e-5
    )


def test_the_loss_of_padded_items_is_that_of_their_real_tokens():
    layer = bound("lha-tail:buckets=4,keys=5,hidden=5")
    q, k, valid = (x.double() if x.is_floating_point() else x for x in padded_batch("left", 30.0))
    loss = loss_of(layer, q, k, mask=mask_of(valid), scale=0.7)
    torch.testing.assert_close(loss, loss_by_hand(layer, q, k, 0.7, valid))


@pytest.mark.parametrize("settings", SETTINGS)
def test_padding_changes_neither_the_loss_nor_its_gradient(settings):
    layer = bound(f"lha-tail:{settings}")
    found = in_every_padding(layer)
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], atol=1e-5, rtol=1e-4)


def test_packed_segments_have_the_loss_of_separate_items():
    layer = bound(f"lha-tail:{SETTINGS[0]}")
    packed, apart, none = packed_and_apart(layer)
    torch.testing.assert_close(packed, apart)
    assert apart > 0
    assert none == 0


def test_output_and_loss_have_gradients_to_nothing_in_common():
    layer = bound(f"lha-tail:{SETTINGS[0]}", heads=4, kv_heads=2)
    grads = separate_gradients(layer, qkv(H=4, G=2))
    # A bias of the last layer shifts the scores of all keys of a bucket alike, which L_K does not see.
    blind = grads.pop("learned.key.biases.1")
    assert blind.abs().max() < 1e-6
    assert all(grad.abs().max() > 1e-6 for grad in grads.values())


def test_a_bucket_that_no_query_is_in_still_learns():
    """The queries that score highest in it, however low, say which keys it needs."""
    layer = bound("lha-tail:buckets=3,keys=5,hash=linear")
    layer.learned.query.biases[0].data[..., 2] = -100.0
    q, k, v = qkv()
    assert (layer.method.scores(q, k, layer.prepare(q, k, v)[3])[0].argmax(-1) != 2).all()
    loss = loss_of(layer, q, k)
    (grad,) = torch.autograd.grad(loss, [layer.learned.key.weights[0]])
    assert grad[..., 2].abs().max() > 1e-3


def test_the_loss_of_large_inputs_is_finite():
    layer = bound(f"lha-tail:{SETTINGS[0]}")
    loss = loss_of(layer, *(10 * x for x in qkv()[:2]), scale=10.0)
    assert loss.isfinite()
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(loss, list(layer.parameters())))


# ---------------------------------------------------------------------- attention


def hand_made(method: sq.Method, call, q, k, v, mask: Mask, cells: int, keys) -> torch.Tensor:
    """The output from the method's scores: the best bucket of each query, the best keys of each bucket, loops."""
    of_query, of_key = method.scores(q, k, call)
    N, M = q.shape[2], k.shape[2]
    valid = mask.query_padding(N)
    label = of_query.argmax(-1)
    label = label if valid is None else torch.where(valid[:, None], label, -1)
    valid_keys = torch.ones(q.shape[0], M, dtype=torch.bool) if mask.key_padding(M) is None else mask.key_padding(M)
    chosen = torch.zeros_like(of_key).mT
    for item, here in enumerate(valid_keys):
        ranked = of_key[item].masked_fill(~here[None, :, None], -torch.inf).mT
        best = ranked.sort(dim=-1, descending=True, stable=True).indices[..., : keys(int(here.sum()))]
        chosen[item].scatter_(2, best, 1.0)
    cell = cells_of_keys(k, mask.key_padding(k.shape[2]), cells=cells, seed=call.seed)
    cell = torch.where(valid_keys[:, None], cell, -1)
    return with_tail(q, k, v, label, chosen, cell, call.scale)


TAILED = {
    "lha-tail:buckets=4,keys=5,cells=3,hidden=5": lambda n: min(n, 5),
    "lha-tail:buckets=3,keys=1,cells=1,hash=linear": lambda n: min(n, 1),
    "lha-tail:buckets=3,keys=12,cells=40,hidden=5": lambda n: min(n, 12),
    "lsh:buckets=4,tail=3": lambda n: min(n, max(1, int(n / 4 * 2**0.5))),
    "lsh:buckets=3,bucket_size=4,enlarge=1.5,tail=2": lambda n: min(n, 6),
    "lsh:buckets=4,tail=2,hash=random": lambda n: min(n, max(1, int(n / 4 * 2**0.5))),
}


@pytest.mark.parametrize("text", TAILED)
@pytest.mark.parametrize("mask", [Mask(), Mask.padding(keys=[17, 2], queries=[4, 11])], ids=["whole", "padded"])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_attention_is_that_of_one_bucket_and_its_tail_written_out(text, mask, kv_heads):
    layer = bound(text, kv_heads=kv_heads).eval()
    cells = getattr(layer.method, "cells", 0) or layer.method.tail
    inputs = tracked(*qkv(11, 17, G=kv_heads, dtype=torch.float64))
    *_, call = layer.prepare(*inputs, mask=mask)
    out, wanted = layer(*inputs, mask=mask), hand_made(layer.method, call, *inputs, mask, cells, TAILED[text])
    torch.testing.assert_close(out, wanted)
    assert (out != 0).any()
    torch.testing.assert_close(gradients(out, *inputs), gradients(wanted, *inputs))


def test_every_real_query_has_exactly_one_bucket():
    layer = bound(f"lha-tail:{SETTINGS[0]}")
    q, k, v = qkv(50)
    mask = Mask.padding([50, 13])
    (buckets,) = layer.method.meetings(q, k, layer.prepare(q, k, v, mask=mask)[3])
    assert buckets.bucket is not None
    times = torch.zeros(2, 2, 51).scatter_add(
        2, buckets.queries.flatten(2), torch.ones(*buckets.queries.shape).flatten(2)
    )
    assert torch.equal(times[..., :50], mask.query_padding(50)[:, None].expand(-1, 2, -1).float())
    counts = buckets.multiplicity(50, 50, mask).sum(-1)
    assert counts.unique().tolist() == [0, 5]


@pytest.mark.parametrize("settings", ["keys=1,cells=1", "keys=6,cells=3", "buckets=1,keys=3,cells=2"])
def test_exact_where_all_queries_are_equal(settings):
    layer = bound(f"lha-tail:hidden=5,{settings}").eval()
    q, k, v = qkv(11, 40)
    q = 3 * q[:, :, :1].expand(-1, -1, 11, -1)
    torch.testing.assert_close(layer(q, k, v), naive(q, k, v), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("cells", [1, 50])
def test_as_many_keys_as_there_are_is_exact_and_fewer_is_not(cells):
    q, k, v = qkv(19, 24)
    errors = []
    for keys in (24, 100, 5):
        layer = bound(f"lha-tail:buckets=3,keys={keys},cells={cells},hidden=5").eval()
        errors.append((layer(q, k, v) - naive(q, k, v)).abs().max())
    assert max(errors[:2]) < 1e-5
    # With a cell for each key nothing is summed up, so that this is exact as well.
    assert (errors[2] > 1e-2) == (cells == 1)


def test_items_with_fewer_keys_than_cells_or_exact_keys():
    layer = bound("lha-tail:buckets=4,keys=10,cells=6,hidden=5").eval()
    q, k, v = qkv(30, B=4)
    lengths = [30, 8, 4, 1]
    out = layer(q, k, v, mask=Mask.padding(lengths))
    for item, n in enumerate(lengths):
        alone = [x[item : item + 1, :, :n] for x in (q, k, v)]
        torch.testing.assert_close(out[item, :, :n], layer(*alone)[0], atol=1e-5, rtol=1e-4)
        if n <= 10:
            torch.testing.assert_close(out[item, :, :n], naive(*alone)[0], atol=1e-5, rtol=1e-4)


def test_more_cells_come_closer():
    q, k, v = qkv(200, H=4)
    errors = [
        (bound(f"lha-tail:keys=8,cells={cells}", heads=4).eval()(q, k, v) - naive(q, k, v)).norm()
        for cells in (1, 16, 120)
    ]  # fmt: skip
    assert errors[2] < 0.8 * errors[1]
    assert errors[1] < errors[0]


# ---------------------------------------------------------------------- learning


@pytest.mark.slow
def test_it_learns_groups_that_random_directions_do_not_find():
    unseen, value = planted(0, heads=4), normal(2, 4, 64, 16, seed=1)
    exact = naive(unseen.query, unseen.key, value, scale=SCALE)

    @torch.no_grad()
    def error(run) -> float:
        return float((run(unseen.query, unseen.key, value, scale=SCALE) - exact).norm() / exact.norm())

    layer = bound("lha-tail:buckets=8,keys=24,cells=2", heads=4, width=16)
    start, after = error(layer), error(fitted(layer, 4, steps=250, learning_rate=3e-3))
    random = [error(sq.RandomHash(buckets=8, bucket_size=24, enlarge=1.0, tail=2, seed=seed)) for seed in range(4)]
    assert after < 0.03
    assert after < 0.2 * start
    assert after < 0.2 * sum(random) / len(random)
