"""A sequence on one rank, which needs no other processes."""

import pytest
import torch

import subquad as sq
from subquad.distributed.collectives import as_bytes
from subquad.distributed.head_exchange import key_heads
from subquad.distributed.shares import even_shares
from subquad.testing.contract import lengths_to_bool
from subquad.testing.oracle import gradients, normal, qkv


def test_without_a_group_the_remedy_is_said():
    with pytest.raises(RuntimeError, match="start the processes by torchrun"):
        sq.distributed.Sequence([4])


@pytest.mark.parametrize(
    ("lengths", "how", "message"),
    [
        ([3, 4], {}, r"the group has 1 ranks, and each has at least 1 token: give 1 numbers"),
        ([0], {}, "each has at least 1 token"),
        ([2.0], {}, "each has at least 1 token"),
        ([5], {"keys": [1, 2]}, r"keys=\(1, 2\)"),
        ([5], {"mode": "rings"}, "mode='rings', but it must be one of 'auto', 'summary', 'heads', 'ring'"),
    ],
)
def test_a_split_that_does_not_fit_is_refused(alone: None, lengths: list, how: dict, message: str):
    with pytest.raises(ValueError, match=message):
        sq.distributed.Sequence(lengths, **how)


@pytest.mark.parametrize("mode", ["auto", "heads"])
@pytest.mark.parametrize("method", ["linear", "local:window=3", "i-clustered:clusters=4,topk=3", "nystrom:landmarks=5"])
def test_one_rank_has_all(alone: None, method: str, mode: str):
    q, k, v = qkv(21)
    of = sq.distributed.Sequence.even(21, mode=mode)
    want = sq.attention(q, k, v, method=method, mask=sq.Mask.padding([21, 9]))
    have = sq.attention(q, k, v, method=method, mask=sq.Mask.padding([21, 9]), parallel=of)
    torch.testing.assert_close(have, want, atol=1e-5, rtol=1e-5)
    assert torch.equal(of.unshard(of.shard(q, dim=2), dim=2), q)


@pytest.mark.parametrize(
    ("method", "mode"), [("full:kernel=subquad", "ring"), ("longformer:window=3", "auto"), ("bigbird:random=0", "auto")]
)
def test_nan_in_padding_stays_there(alone: None, method: str, mode: str):
    valid = lengths_to_bool([20, 9], 21, "left")
    q, k, v = (x.masked_fill(~valid[:, None, :, None], torch.nan).requires_grad_() for x in qkv(21))
    of = sq.distributed.Sequence.even(21, mode=mode)
    out = sq.attention(q, k, v, method=method, mask=sq.Mask.padding(valid), parallel=of)
    assert all(x.isfinite().all() for x in (out, *gradients(out, q, k, v)))


def nested(x: torch.Tensor) -> torch.Tensor:
    """Items of one length, as a nested tensor (B,H,length,D)."""
    return torch.nested.as_nested_tensor(list(x.transpose(1, 2)), layout=torch.jagged).transpose(1, 2)


def test_a_block_gives_calls_their_sequence(alone: None):
    q, k, v = qkv(21)
    of, other = sq.distributed.Sequence.even(21), sq.distributed.Sequence.even(20)
    layer = sq.nn.MultiheadAttention(16, 2, method="linear")
    with sq.distributed.use(other):
        with pytest.raises(ValueError, match="`query` has 21 positions on rank 0, but its share of the sequence is 20"):
            sq.attention(q, k, v, method="linear")
        with pytest.raises(ValueError, match="share of the sequence is 20"):
            layer(normal(2, 21, 16))
        with pytest.raises(ValueError, match="`parallel` is not supported with nested tensors"):
            sq.attention(*[nested(q)] * 3, method="linear")
        with pytest.raises(ValueError, match="decode on one rank"):
            layer.eval().step(normal(2, 20, 16), layer.init_state(2))
        sq.attention(q, k, v, method="linear", parallel=of)  # what is given counts
        with sq.distributed.use(of):  # and the innermost block
            sq.attention(q, k, v, method="linear")
        with sq.distributed.use(None):
            layer(normal(2, 21, 16))
    layer(normal(2, 21, 16))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "method",
    ["full", "linformer:k=4", "rfa:features=8", "tilted-pool:pools=3,window=2", "learned-feature-map:window=3"],
)
def test_one_rank_has_all_that_a_bound_method_needs(alone: None, method: str, causal: bool):
    q, k, v = qkv(21, H=2, D=8, E=8)
    known = sq.parse_method(method)
    if causal and known.traits.causal == "no":
        causal = False
    bound = known.bind(heads=2, head_dim=8, max_length=21)
    mask = sq.Mask.padding([21, 9]) & (sq.Mask.causal() if causal else sq.Mask())
    of = sq.distributed.Sequence.even(21, mode="ring" if method == "full" else "summary")
    torch.testing.assert_close(bound(q, k, v, mask=mask, parallel=of), bound(q, k, v, mask=mask), atol=1e-5, rtol=1e-5)


def test_what_does_not_go_with_it_is_refused(alone: None):
    q, k, v = qkv(21)
    of = sq.distributed.Sequence.even(21)
    for how, message in (
        ({"dropout_p": 0.1}, "`parallel` is not supported with dropout, .* use dropout_p=0"),
        ({"bias": normal(1, 1, 21, 20)}, r"`bias` is \(1, 1, 21, 20\) but attention is"),
        ({"keep": [21]}, "`keep` has the index 21, but the query has 21 positions"),
        ({"keep": torch.ones(2, 20).bool()}, "`keep` has 20 columns but the query has 21 positions"),
        (
            {"keep": [0], "mask": sq.Mask.causal(offset=3)},
            "`keep` needs query i at .* first query at key 3",
        ),
        ({"mask": sq.Mask.padding([21, 22])}, "padding has a length of 22, but there are 21 positions"),
        ({"mask": sq.Mask.dense(torch.ones(1, 1, 21, 20).bool())}, r"the dense mask is \(1, 1, 21, 20\)"),
    ):
        with pytest.raises(ValueError, match=message):
            sq.attention(q, k, v, method="full", parallel=of, **how)
    by_summary = sq.distributed.Sequence.even(21, mode="summary")
    with pytest.raises(
        ValueError, match=r"mode='summary' is not available for a mask with an offset: .* use mode='heads"
    ):
        sq.attention(q, k, v, method="local", parallel=by_summary, mask=sq.Mask.causal(offset=3))
    with pytest.raises(ValueError, match="`keep` is for self-attention, but the sequence has keys of its own"):
        sq.attention(q, k, v, method="full", parallel=sq.distributed.Sequence([21], keys=[21]), keep=[0])
    with pytest.raises(ValueError, match="`query` has 21 positions on rank 0, but its share of the sequence is 20"):
        sq.attention(q, k, v, method="linear", parallel=sq.distributed.Sequence([20]))
    mask, tilted = sq.Mask.padding(keys=[21, 9]), sq.TiltedPool(pools=3, window=2).bind(heads=q.shape[1], head_dim=8)
    with pytest.raises(ValueError, match="'tilted-pool' with mode='summary' takes one padding for both sides"):
        tilted(*qkv(21, D=8), mask=mask, parallel=of)
    with pytest.raises(TypeError, match=r"`parallel` is a int, but it must be a sq\.distributed\.Sequence"):
        sq.attention(q, k, v, method="linear", parallel=3)
    with pytest.raises(ValueError, match="axis 1 has 2 positions, but the sequence has 21 tokens"):
        of.shard(q)
    for cut in (of.shard, of.unshard):
        with pytest.raises(
            ValueError, match=r"dim=5, but a tensor of shape \(2, \d, 21, \d+\) has axes 0 to 3; give the"
        ):
            cut(q, dim=5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(1,), (1, 1, 1, 1), (0, 2), (3, 2)])
def test_bytes_are_those_of_the_numbers_whatever_the_strides(dtype: torch.dtype, shape: tuple[int, ...]):
    """Those of a single number too, which lies in a larger tensor."""
    x = (normal(1, 20) * 9).to(dtype).as_strided(shape, (3,) * len(shape))
    have = as_bytes(x)
    assert have.dtype == torch.uint8
    assert torch.equal(have.view(dtype), x.reshape(-1))


def test_shares_are_as_even_as_can_be():
    assert even_shares(11, 4) == (3, 3, 3, 2)
    assert even_shares(2, 4) == (1, 1, 0, 0)


def test_query_heads_come_with_their_key_heads():
    assert key_heads(slice(0, 4), 2) == [0, 1]
    assert key_heads(slice(1, 4), 2) == [0, 1, 1]  # one of the first's, both of the second's
    assert key_heads(slice(3, 4), 2) == [1]
    assert key_heads(slice(4, 4), 2) == []


@pytest.mark.parametrize("method", ["i-clustered:clusters=4,topk=3", "local:window=3", "lsh:buckets=3,bucket_size=4"])
def test_kept_tokens_are_those_of_one_rank(alone: None, method: str):
    q, k, v = qkv(21)
    of, mask = sq.distributed.Sequence.even(21, mode="summary"), sq.Mask.padding([21, 9])
    named = torch.zeros(len(q), 21, dtype=torch.bool)
    named[0, 3] = named[1, 8] = named[1, 20] = True
    for keep in ([0, 12, -1], [[0, 1], [2, 2]], named, torch.zeros_like(named), []):
        want = sq.attention(q, k, v, method=method, mask=mask, keep=keep, return_lse=True)
        have = sq.attention(q, k, v, method=method, mask=mask, keep=keep, parallel=of, return_lse=True)
        torch.testing.assert_close(have, want, atol=1e-5, rtol=1e-5)


def test_kept_tokens_take_two_exchanges_more_in_each_direction_and_bools_two_to_count(alone: None):
    of, calls = sq.distributed.Sequence.even(21, mode="summary"), []
    for keep in (None, [0, -1], torch.arange(21).expand(2, -1) < 2):
        inputs = [x.requires_grad_() for x in qkv(21)]
        with sq.distributed.traffic() as sent:
            out = sq.attention(*inputs, method="linear", keep=keep, parallel=of)
            forward = sent.calls
            out.sum().backward()
        calls.append((forward, sent.calls - forward))
    assert calls == [(1, 1), (3, 3), (5, 3)]


def test_kept_tokens_that_do_not_fit_are_refused(alone: None):
    q, k, v = qkv(21)
    of, across = (sq.distributed.Sequence.even(21, keys=keys) for keys in (None, 21))
    for parallel, keep, message in (
        (of, [21], "`keep` has the index 21, but the query has 21 positions"),
        (of, [[0]], "`keep` has 1 rows of indices but the batch is 2"),
        (of, torch.ones(2, 20).bool(), "`keep` has 20 columns but the query has 21 positions"),
        (across, [0], "`keep` is for self-attention, but the sequence has keys of its own"),
    ):
        with pytest.raises(ValueError, match=message):
            sq.attention(q, k, v, method="clustered", keep=keep, parallel=parallel)
