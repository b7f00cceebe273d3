"""Kept tokens: their rows and columns are exact, and the rest is the method on the other tokens."""

import json
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import subquad as sq
from subquad import Mask
from subquad.methods.core.method import Call
from subquad.testing.contract import TOLERANCE, at_exact_limit, bound_for, close, has_exact_limit, run
from subquad.testing.oracle import gradients, naive, normal, qkv, tracked
from tests.forks import output_of
from tests.library.methods import kept_alone
from tests.library.methods.dense import weighted_softmax

N = 24
KEEP = [0, 7, -1]
KEPT = torch.tensor([0, 7, 23])
BUCKETED = (
    "local:window=3",
    "lha:buckets=4,hidden=8",
    "lsh:buckets=4",
    "smyrf:clusters=4,rounds=2",
    "smyrf:clusters=4",
)
OTHERS = (
    "clustered:clusters=5,bits=15",
    "i-clustered:clusters=5,bits=15,topk=4",
    "clustered-tail:clusters=5,topk=4,cells=3,bits=15",
    "lha-tail:buckets=4,keys=6,cells=3,hidden=8",
    "linear",
    "performer:features=32",
    "linformer:k=8",
    "tilted-pool:window=3",
    "cluster-former:window=3,chunk=4",
    "learned-feature-map:window=3",
    "reformer:buckets=4",
    "sinkhorn:block=4",
    "mixed-heads:methods=local:window=3+lsh:buckets=4",
    "oracle-top:topk=3",
    "longformer:window=3,first=2",
    "bigbird:block=3,random=1",
    "strided:stride=4",
    "fixed:block=4,columns=1",
    "logsparse:window=1",
)
EVERY = BUCKETED + OTHERS
FEW = ("local:window=3", "smyrf:clusters=4", OTHERS[1], OTHERS[2], "linear")


def is_kept(tokens: Tensor = KEPT, length: int = N, batch: int = 2) -> Tensor:
    """Bool (B,N)."""
    kept = torch.zeros(batch, length, dtype=torch.bool)
    kept[:, tokens] = True
    return kept


def by_hand(method: sq.Method, q, k, v, mask: Mask, kept: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse), with e^lse and N×M matrices: the method without the kept tokens, and what exact attention adds."""
    seen = replace(mask, span=None).to_dense(N, N).expand(2, -1, N, N)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    weights = torch.where(seen, (q @ k.mT * q.shape[-1] ** -0.5).exp(), 0.0)
    out, lse = run(method, q, k, v, mask=mask & Mask.padding(~kept), return_lse=True)
    column = kept[:, None, None, :]
    some = torch.where(column, weights, 0.0)
    total = lse.exp() + some.sum(-1)
    out = (out * lse.exp()[..., None] + some @ v) / total[..., None]
    row = kept[:, None, :, None]
    exact = weights @ v / weights.sum(-1, keepdim=True)
    return torch.where(row, exact, out).nan_to_num(0.0), torch.where(row[..., 0], weights.sum(-1), total).log()


# ---------------------------------------------------------------------- what comes out


@pytest.mark.parametrize("text", EVERY)
def test_rows_and_columns_are_exact_and_the_rest_is_the_method_on_the_others(text):
    method, (q, k, v) = sq.parse_method(text), qkv(N)
    got, lse = run(method, q, k, v, keep=KEEP, return_lse=True)
    want, want_lse = by_hand(method, q, k, v, Mask(), is_kept())
    close(got, want)
    close(lse, want_lse)
    close(got[:, :, KEPT], naive(q, k, v)[:, :, KEPT])
    close(run(method, q, k, v, keep=KEEP), got)


@pytest.mark.parametrize("text", BUCKETED)
@pytest.mark.parametrize("causal", [False, True])
def test_a_bucketed_method_is_a_softmax_that_counts_kept_keys_once(text, causal):
    method, (q, k, v) = sq.parse_method(text), qkv(N)
    mask = Mask.causal() if causal else Mask()
    if method.refuses(mask):
        return
    bound = bound_for(method, q, k, v)
    kept = is_kept()
    call = Call(mask & Mask.padding(~kept), None, 8**-0.5, 0.0, method.default_seed, bound.learned)
    counts = sum(part.multiplicity(N, N, call.mask) for part in method.meetings(q, k, call))
    assert not counts[:, :, :, KEPT].any()
    assert not counts[:, :, KEPT].any()
    exact = kept[:, None, :, None] | kept[:, None, None, :]
    counts = torch.where(exact, mask.to_dense(N, N).float(), counts)
    close(bound(q, k, v, mask=mask, keep=KEEP), weighted_softmax(q, k, v, counts, 8**-0.5))


def test_linear_attention_with_kept_tokens_by_its_weights():
    q, k, v = qkv(N)
    of_query, of_key = (torch.nn.functional.elu(x) + 1 for x in (q, k))
    exact = is_kept()[:, None, :, None] | is_kept()[:, None, None, :]
    weights = torch.where(exact, (q @ k.mT * 8**-0.5).exp(), of_query @ of_key.mT)
    close(sq.attention(q, k, v, method="linear", keep=KEEP), weights @ v / weights.sum(-1, keepdim=True))


@pytest.mark.parametrize("text", ["i-clustered:clusters=5,topk=4", "clustered:clusters=5", "performer:features=32"])
def test_weights_of_kept_keys_are_those_of_one_softmax(text):
    """With the identity as values the output is the weights."""
    (q, k, _), eye = qkv(N), torch.eye(N).expand(2, 2, N, N)
    weights, lse = sq.attention(q, k, eye, method=text, keep=KEEP, return_lse=True)
    close(weights.sum(-1), torch.ones(2, 2, N))
    close(weights[..., KEPT], (q @ k.mT * 8**-0.5 - lse[..., None]).exp()[..., KEPT])


@pytest.mark.parametrize("method", [m for m in (c() for c in sq.METHODS.values()) if m.traits.lse], ids=str)
def test_at_the_exact_limit_keep_changes_nothing(method):
    if not has_exact_limit(method.traits) or method.traits.multiplicity != 1:
        return
    q, k, v = qkv(13)
    close(run(at_exact_limit(method, 13, 13), q, k, v, keep=[0, 5]), naive(q, k, v))


@pytest.mark.parametrize("text", FEW)
def test_keeping_all_is_exact_and_keeping_none_changes_nothing(text):
    q, k, v = qkv(N)
    method, mask = sq.parse_method(text), Mask.padding([N, 9])
    exact = sq.attention(q, k, v, method="full", mask=mask)
    close(method(q, k, v, mask=mask, keep=range(N)), exact)
    close(method(q, k, v, mask=mask, keep=torch.ones(2, N, dtype=torch.bool)), exact)
    plain = method(q, k, v, mask=mask)
    for none in (None, [], torch.zeros(0, dtype=torch.int64), torch.zeros(2, N, dtype=torch.bool)):
        assert torch.equal(method(q, k, v, mask=mask, keep=none), plain)


def test_all_ways_to_name_tokens_agree():
    q, k, v = qkv(N)
    ways = [
        KEEP,
        (0, 7, 23),
        [0, 7, -1, 23, -24, 7],  # twice
        KEPT,
        KEPT.int(),
        KEPT.expand(2, -1),
        is_kept(),
        is_kept().tolist(),
    ]
    outs = [sq.attention(q, k, v, method="local:window=2", keep=way) for way in ways]
    for out in outs:
        close(out, outs[0], atol=1e-6)


def test_items_keep_tokens_of_their_own():
    q, k, v = qkv(N)
    kept = torch.zeros(2, N, dtype=torch.bool)
    kept[0, [3, 4, 20]] = True
    kept[1, 11] = True
    out = sq.attention(q, k, v, method="smyrf:clusters=4", keep=kept)
    for item, tokens in enumerate(([3, 4, 20], [11])):
        alone = (x[item : item + 1] for x in (q, k, v))
        close(out[item], sq.attention(*alone, method="smyrf:clusters=4", keep=tokens)[0])
    close(out, sq.attention(q, k, v, method="smyrf:clusters=4", keep=torch.tensor([[3, 4, 20], [11, 11, -13]])))


# ---------------------------------------------------------------------- masks


@pytest.mark.parametrize("text", ["local:window=3", "linear", "performer:features=32", "oracle-top:topk=3"])
def test_kept_tokens_obey_a_causal_mask(text):
    method, (q, k, v) = sq.parse_method(text), qkv(N)
    want, _ = by_hand(method, q, k, v, Mask.causal(), is_kept())
    got = method(q, k, v, is_causal=True, keep=KEEP)
    close(got, want)
    close(got[:, :, KEPT], naive(q, k, v, Mask.causal().to_dense(N, N))[:, :, KEPT])
    later = [x.clone() for x in (q, k, v)]
    for x in later:
        x[:, :, 8:] += 5.0
    close(method(*later, is_causal=True, keep=KEEP)[:, :, :8], got[:, :, :8])


@pytest.mark.parametrize("text", ["full", "local:window=9", "oracle-top:topk=24"])
def test_a_window_does_not_restrict_kept_tokens(text):
    q, k, v = qkv(N)
    mask = Mask.window(2)
    kept = is_kept()
    allowed = mask.to_dense(N, N) | kept[:, None, :, None] | kept[:, None, None, :]
    close(sq.attention(q, k, v, method=text, mask=mask, keep=KEEP), naive(q, k, v, allowed))
    causal = Mask.causal()
    both = naive(q, k, v, allowed & causal.to_dense(N, N))
    close(sq.attention(q, k, v, method=text, mask=mask & causal, keep=KEEP), both)


@pytest.mark.parametrize("text", [*FEW, "oracle-top:topk=3", "full"])
def test_kept_tokens_stay_in_their_segment(text):
    q, k, v = qkv(N)
    ids = torch.tensor([[0] * 9 + [4] * 10 + [-1] * 5, [-1] + [2] * 20 + [1] * 3])
    packed, lse = sq.attention(q, k, v, method=text, mask=Mask.segments(ids), keep=[0, 12, -2], return_lse=True)
    for item, start, end, tokens in ((0, 0, 9, [0]), (0, 9, 19, [3]), (1, 1, 21, [11]), (1, 21, 24, [1])):
        alone = (x[item : item + 1, :, start:end] for x in (q, k, v))
        out, own = sq.attention(*alone, method=text, keep=tokens, return_lse=True)
        close(packed[item, :, start:end], out[0])
        close(lse[item, :, start:end], own[0])
    assert (packed[ids[:, None].expand(-1, 2, -1) < 0] == 0).all()


def test_kept_tokens_obey_dense_masks_and_biases():
    q, k, v = qkv(N)
    dense, bias = normal(2, 1, N, N, seed=4) > 0, normal(1, 2, N, N, seed=5)
    method = sq.parse_method("oracle-top:topk=24")
    mask = Mask.dense(dense) & Mask.padding([N, 15])
    for keep in (KEEP, is_kept()):
        close(method(q, k, v, mask=mask, bias=bias, keep=keep), naive(q, k, v, mask.to_dense(N, N), bias))


@pytest.mark.parametrize("text", EVERY)
def test_neither_amount_nor_content_of_padding_matters(text):
    method = sq.parse_method(text)
    q, k, v = qkv(N)
    lengths = [N, 10]
    keep = torch.tensor([[0, 7, 23], [0, 7, 9]])
    out, lse = run(method, q, k, v, mask=Mask.padding(lengths), keep=keep, return_lse=True)
    assert (out[1, :, 10:] == 0).all()
    assert lse[1, :, 10:].isneginf().all()
    alone = (x[1:, :, :10] for x in (q, k, v))
    close(out[1:, :, :10], run(method, *alone, keep=[0, 7, 9]))
    for filler in (torch.nan, 1e4):
        spoilt = [x.clone() for x in (q, k, v)]
        for x in spoilt:
            x[1, :, 10:] = filler
        again, of_keys = (
            run(method, *spoilt, mask=mask, keep=keep)
            for mask in (Mask.padding(lengths), Mask.padding(keys=lengths, queries=lengths))
        )
        close(again, out)
        close(of_keys, out)


@pytest.mark.parametrize("text", FEW)
def test_padding_is_never_kept(text):
    method, (q, k, v) = sq.parse_method(text), qkv(N)
    mask = Mask.padding([N, 10])
    wanted = method(q, k, v, mask=mask, keep=torch.tensor([[0, 23], [0, 0]]))
    close(method(q, k, v, mask=mask, keep=[0, -1]), wanted)
    special = torch.zeros(2, N, dtype=torch.bool)
    special[:, [0, 23]] = True
    special[1, 10:] = True  # as a tokenizer's special_tokens_mask
    close(method(q, k, v, mask=mask, keep=special), wanted)


def test_padded_keys_of_real_queries_keep_their_rows():
    q, k, v = qkv(N)
    mask = Mask.padding(keys=[N, 10])
    out = sq.attention(q, k, v, method="i-clustered:clusters=5,topk=4", mask=mask, keep=[0, -1])
    close(out[:, :, [0, -1]], naive(q, k, v, mask.to_dense(N, N))[:, :, [0, -1]])


@pytest.mark.parametrize("text", FEW)
def test_an_item_without_real_tokens_is_zero(text):
    out, lse = sq.attention(*qkv(N), method=text, mask=Mask.padding([N, 0]), keep=KEEP, return_lse=True)
    assert (out[1] == 0).all()
    assert lse[1].isneginf().all()
    assert out.isfinite().all()


# ---------------------------------------------------------------------- heads, dtypes, gradients, compilers


@pytest.mark.parametrize("text", FEW)
def test_grouped_heads_equal_repeated_ones(text):
    q, k, v = qkv(N, H=4, G=2)
    repeated = (x.repeat_interleave(2, dim=1) for x in (k, v))
    got = sq.attention(q, k, v, method=text, keep=KEEP, enable_gqa=True)
    exact = naive(q, k, v)
    close(got[:, :, KEPT], exact[:, :, KEPT])
    if not text.startswith("clustered-tail"):  # whose cells are those of key heads
        close(got, sq.attention(q, *repeated, method=text, keep=KEEP))


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("text", FEW)
def test_16_bits_come_out_and_the_rows_are_exact(text, dtype):
    q, k, v = (x.to(dtype) for x in qkv(N))
    out, lse = sq.attention(q, k, v, method=text, keep=KEEP, return_lse=True)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    exact = naive(q.float(), k.float(), v.float())
    torch.testing.assert_close(out.float()[:, :, KEPT], exact[:, :, KEPT], atol=TOLERANCE[dtype], rtol=0)
    with torch.autocast("cpu", dtype):
        assert sq.attention(*qkv(N), method=text, keep=KEEP).dtype == dtype


@pytest.mark.parametrize("text", FEW)
def test_gradients_in_fp64(text):
    inputs = tracked(*qkv(9, B=1, D=3, E=2, dtype=torch.float64))

    def both(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = sq.attention(q, k, v, method=text, mask=Mask.padding([8]), keep=[0, 5, -1], return_lse=True)
        return torch.cat([out, lse.masked_fill(lse.isneginf(), 0.0)[..., None]], dim=-1)

    assert torch.autograd.gradcheck(both, inputs, fast_mode=True)
    grads = gradients(both(*inputs), *inputs)
    assert all((grad[:, :, 8] == 0).all() for grad in grads)
    assert all(grad[:, :, 0].any() for grad in grads)


@pytest.fixture(scope="module")
def alone() -> dict[str, dict]:
    """The outcomes of the calls in `kept_alone`, from a process of their own."""
    return json.loads(output_of("tests.library.methods.kept_alone"))


@pytest.mark.long  # other tests compile methods
@pytest.mark.parametrize("text", kept_alone.COMPILED)
def test_compiles_without_a_break_for_indices_and_with_one_for_a_mask(alone, text):
    assert alone["compiled"][text] is None


def test_dropout_drops_in_kept_rows_and_columns():
    q, k, v = (x[:1].expand(4000, -1, -1, -1) for x in qkv(9, B=1, H=1))
    torch.manual_seed(0)
    out = sq.attention(q, k, v, method="local:window=1", dropout_p=0.3, keep=[0])
    assert out.std(0).min() > 0.02
    plain = sq.attention(q[:1], k[:1], v[:1], method="local:window=1", keep=[0])[0]
    torch.testing.assert_close(out.mean(0), plain, atol=0.08, rtol=0)


def test_the_auxiliary_loss_is_that_of_the_tokens_that_are_not_kept():
    q, k, v = qkv(N)
    bound = sq.parse_method("lha:buckets=4,hidden=8").bind(heads=2, head_dim=8)
    losses = []
    for options in ({"keep": KEEP}, {"mask": Mask.padding(~is_kept())}, {}):
        bound(q, k, v, **options)
        losses.append(bound.auxiliary_loss())
    close(losses[0], losses[1])
    assert losses[0] != losses[2]


# ---------------------------------------------------------------------- layers


def test_a_layer_keeps_tokens():
    torch.manual_seed(0)
    layer = sq.nn.MultiheadAttention(16, 2, method="local:window=2").eval()
    exact = sq.nn.MultiheadAttention(16, 2, method="full").eval()
    exact.load_state_dict(layer.state_dict())
    x = normal(2, N, 16)
    close(layer(x, keep=KEEP)[:, KEPT], exact(x)[:, KEPT])
    assert not torch.allclose(layer(x)[:, KEPT], exact(x)[:, KEPT], atol=1e-3)
    with pytest.raises(ValueError, match="`keep` is for self-attention, but there are 24 queries and 9 keys"):
        sq.nn.MultiheadAttention(16, 2, method="clustered")(x, x[:, :9], keep=[0])


# ---------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("keep", "error", "message"),
    [
        (torch.zeros(2, 20, dtype=torch.bool), ValueError, "`keep` has 20 columns but the query has 24 positions"),
        (torch.zeros(3, N, dtype=torch.bool), ValueError, "`keep` has 3 rows but the batch is 2; they must match"),
        (torch.zeros(N, dtype=torch.bool), ValueError, r"`keep` is a bool \(24,\), but a bool must be .* \(2, 24\)"),
        ([24], ValueError, "`keep` has the index 24, but the query has 24 positions, so indices run from -24 to 23"),
        (torch.tensor([0, -25]), ValueError, "`keep` has the index -25, but the query has 24 positions"),
        (torch.zeros(3, 2, dtype=torch.int64), ValueError, "`keep` has 3 rows of indices but the batch is 2"),
        (torch.zeros(1, 2, 2, dtype=torch.int64), ValueError, r"`keep` is \(1, 2, 2\), but it must be token indices"),
        (torch.zeros(2, N), TypeError, "`keep` is torch.float32, but it must be token indices"),
        ([0.5], TypeError, "`keep` is torch.float32, but it must be token indices"),
        (["first"], TypeError, "`keep` must be token indices"),
    ],
)
def test_mistakes_are_one_line_that_names_both_sides(keep, error, message):
    for method in ("full", "local:window=3"):
        with pytest.raises(error, match=message) as raised:
            sq.attention(*qkv(N), method=method, keep=keep)
        assert "\n" not in str(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize("kind", kept_alone.WRONG)
def test_other_types_are_refused(alone, kind):
    wanted = f"`keep` is a {kind}, but it must be token indices, int (S,) or (B, S), or a bool (B, N), such as [0, -1]"
    assert alone["wrong"][kind] == wanted


def test_cross_attention_and_shifted_queries_are_refused():
    with pytest.raises(ValueError, match="`keep` is for self-attention, but there are 24 queries and 9 keys"):
        sq.attention(*qkv(N, 9), method="clustered", keep=[0])
    with pytest.raises(ValueError, match="mask puts the first query at key 3"):
        sq.attention(*qkv(N), method="local", mask=Mask.causal(offset=3), keep=[0])


@pytest.mark.parametrize("text", ["nystrom", "rfa", "mixed-heads:methods=rfa+local"])
def test_methods_without_a_log_sum_exp_refuse(text):
    with pytest.raises(ValueError, match="does not support `keep`, which needs its log-sum-exp; use method='full'"):
        run(sq.parse_method(text), *qkv(N), keep=[0])
