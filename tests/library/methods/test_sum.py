"""Sums count each key once: against N×N weights that are put together from what each part gives alone."""

import copy
import pickle
import re

import pytest
import torch
from torch import Tensor

import subquad as sq
from subquad import Mask, Sum
from subquad.testing.oracle import gradients, naive, normal, qkv, tracked
from tests.library.hf.models import build

PAIRS = (
    "local:window=3+lsh:buckets=3",
    "local:window=2+local:window=5",
    "lha:buckets=3,hidden=8+smyrf:cluster_size=6",
    "cluster-former:window=2,chunk=4,clusters=3+reformer:rounds=2,chunk=4",
    "local:window=2+lsh:buckets=3,selection=argmax+routing:clusters=3,cluster_size=4",
    "local:window=3+lsh:buckets=70,bucket_size=2",
    "bigbird:block=3,random=1+strided:stride=5",
    "longformer:window=2,first=2+fixed:block=4,columns=1+logsparse:window=1",
)
KEPT = (
    "local:window=2+keep",
    "lsh:buckets=3+keep:first=2,last=1",
    "local:window=3+keep:every=5,sides=columns",
    "i-clustered:clusters=4,topk=3+keep:first=2",
    "linear+keep:first=3,sides=columns",
    "tilted-pool:pools=4,window=2+keep:first=2",
)
RESTS = (
    "lha-tail:buckets=3,keys=4,cells=3,hidden=8",
    "clustered-tail:clusters=4,topk=3,cells=3",
    "lsh:buckets=3,tail=3",
    "clustered:clusters=4",
    "linear",
    "linear:feature_map=softmax",
    "performer:features=16",
    "performer:features=16,inputs=learned",
    "performer:features=8,kind=hyperbolic",
    "performer:features=9,kind=relu",
    "performer:features=8,kind=favor++",
    "learned-feature-map:features=12,window=0,sinks=0",
)
BESIDE = ("local:window=2", "strided:stride=4+bigbird:block=2,random=1", "smyrf:clusters=3+keep:first=2,last=1")


def texts() -> list[str]:
    return [*PAIRS, *KEPT, *(f"{BESIDE[number % 3]}+{rest}" for number, rest in enumerate(RESTS))]


def kept_pairs(keep: sq.Keep | None, mask: Mask, N: int) -> tuple[Tensor, Mask]:
    """The pairs (B,1,N,N) that the kept tokens count, and the mask without them, item by item."""
    valid = mask.key_padding(N)
    valid = torch.ones(2, N, dtype=torch.bool) if valid is None else valid
    columns, rows = torch.zeros(2, 1, N, N, dtype=torch.bool), torch.ones_like(valid)
    for item, tokens in enumerate(row.nonzero()[:, 0].tolist() for row in valid):
        if keep is None:
            continue
        own = {*tokens[: keep.first], *tokens[len(tokens) - min(keep.last, len(tokens)) :]}
        own |= set(tokens[:: keep.every] if keep.every else [])
        columns[item, 0, :, list(own)] = True
        rows[item, list(own)] = False
    if keep is None:
        return columns, mask
    left_out = Mask.padding(keys=rows, queries=rows if keep.sides == "both" else torch.ones_like(rows))
    met = columns | columns.mT if keep.sides == "both" else columns
    return met & mask.to_dense(N, N), mask & left_out


def bound(method: sq.Method) -> sq.BoundMethod:
    return method.bind(heads=2, head_dim=8, max_length=64).eval()


def oracle(layer: sq.BoundMethod, query: Tensor, key: Tensor, mask: Mask) -> Tensor:
    """The weight of each key, (B,H,N,N), not yet normalised: e^s where a part counts the pair, else the rest's own."""
    N, method = query.shape[2], layer.method
    assert isinstance(method, Sum)
    keep = next((part for part in method.addends if isinstance(part, sq.Keep)), None)
    exact, inner = kept_pairs(keep, mask, N)
    weights, every = torch.zeros(2, 2, N, N, dtype=query.dtype), torch.eye(N, dtype=query.dtype).expand(2, 2, N, N)
    exact = exact.expand(2, 2, N, N)
    for number, part in enumerate(method.addends):
        own = part.bind(heads=2, head_dim=8, max_length=64).eval()
        if own.learned is not None:
            own.learned = layer.learned[str(number)]
        if hasattr(part, "meetings") and not part.summarises and part is not keep:
            _, _, _, call = own.prepare(query, key, every, mask=inner)
            seen = sum(each.multiplicity(N, N, inner) for each in part.clamped_to(N, N).meetings(query, key, call))
            exact = exact | (seen > 0)
        elif part is not keep:
            out, lse = own(query, key, every, mask=inner, return_lse=True)
            weights = torch.where(lse.isneginf()[..., None], 0.0, out * lse.exp()[..., None])
    return torch.where(exact, (query @ key.mT * 8**-0.5).exp(), weights)


def masks(method: Sum, N: int) -> list[Mask]:
    padded = Mask.padding(torch.arange(N) >= torch.tensor([[0], [N // 2]]))
    found = [Mask(), padded, Mask.causal() & Mask.padding([N, 5]), Mask.causal() & Mask.window(4)]
    return [mask for mask in found if method.refuses(mask) is None]


@pytest.mark.parametrize("text", texts())
def test_each_key_counts_once(text: str):
    method, N = sq.parse_method(text), 22
    layer = bound(method)
    inputs = tracked(*qkv(N, dtype=torch.float64)[:2])
    every = torch.eye(N, dtype=torch.float64).expand(2, 2, N, N)
    for mask in masks(method, N):
        weights = oracle(layer, *inputs, mask)
        total = weights.sum(-1, keepdim=True)
        valid = mask.query_padding(N)
        valid = torch.ones(2, N, dtype=torch.bool) if valid is None else valid
        want = (weights / torch.where(total > 0, total, 1.0)) * valid[:, None, :, None]
        out, lse = layer(*inputs, every, mask=mask, return_lse=True)
        torch.testing.assert_close(out, want, atol=1e-7, rtol=1e-6, msg=lambda m, at=mask: f"{at}: {m}")
        seen = (total[..., 0] > 0) & valid[:, None]
        torch.testing.assert_close(lse[seen], total[..., 0][seen].log())
        assert lse[~seen].isneginf().all()
        for got, wanted in zip(gradients(out, *inputs), gradients(want, *inputs), strict=True):
            torch.testing.assert_close(got, wanted, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("rest", RESTS)
def test_with_every_key_chosen_it_is_exact_attention(rest: str):
    q, k, v = qkv(19)
    for text in (f"local:window=19+{rest}", f"local:window=19+lsh:buckets=2+keep+{rest}"):
        method = sq.parse_method(text)
        for mask in masks(method, 19):
            exact = naive(q, k, v, mask.to_dense(19, 19))
            torch.testing.assert_close(bound(method)(q, k, v, mask=mask), exact, atol=1e-5, rtol=1e-5)


def test_early_queries_of_a_causal_sum_are_exact():
    q, k, v = qkv(40)
    mask = Mask.causal()
    out = sq.attention(q, k, v, method="local:window=8+keep+performer:features=8", mask=mask)
    exact = naive(q, k, v, mask.to_dense(40, 40))
    torch.testing.assert_close(out[:, :, :10], exact[:, :, :10], atol=1e-5, rtol=1e-5)
    assert (out - exact)[:, :, 10:].abs().amax() > 1e-2


def test_a_step_on_a_cache_is_the_last_row():
    q, k, v = qkv(30)
    for text in ("local:window=4+keep:first=2", "local:window=4+keep:first=2,sides=columns+linear"):
        whole = sq.attention(q, k, v, method=text, is_causal=True)
        last = sq.attention(q[:, :, -2:], k, v, method=text, mask=Mask.causal(offset=28))
        torch.testing.assert_close(last, whole[:, :, -2:])


def test_the_keep_of_a_call_is_left_out_of_every_part():
    q, k, v = qkv(30)
    method = sq.parse_method("local:window=2+keep:first+linear")
    out = method(q, k, v, keep=[7])
    want = naive(q, k, v)
    torch.testing.assert_close(out[:, :, 7], want[:, :, 7])
    torch.testing.assert_close(out[:, :, 0], want[:, :, 0])


# ---------------------------------------------------------------------- the text


@pytest.mark.parametrize(("text", "wanted"), [
    ("local:window=32+keep:first+lha-tail", "local:window=32+keep+lha-tail"),
    (" keep:first=4 + lha-tail:cells=8 + local:window=32 ", "local:window=32+keep:first=4+lha-tail:cells=8"),
    ("keep:last+(local:window=5+lsh:buckets=4,seed=0)", "local:window=5+lsh:buckets=4+keep:last=1"),
    ("lha:enlarge=1e+20,buckets=4+local", "lha:buckets=4,enlarge=1e+20+local"),
    ("sum:terms=local:window=5;positions=none+keep", "local:window=5+keep"),
])  # fmt: skip
def test_every_spelling_becomes_one(text, wanted):
    method = sq.parse_method(text)
    assert isinstance(method, Sum)
    assert str(method) == wanted
    assert method == sq.parse_method(wanted) == sq.from_dict(method.to_dict()) == Sum(method.terms)
    assert hash(method) == hash(sq.parse_method(wanted))
    assert pickle.loads(pickle.dumps(method)) == copy.deepcopy(method) == method
    assert copy.deepcopy(method).addends == method.addends


def test_methods_are_added():
    added = sq.Local(window=5) + sq.Keep(first=2) + sq.LinearAttention()
    assert (
        added
        == sq.parse_method("local:window=5+keep:first=2+linear")
        == Sum.from_methods("linear", "keep:first=2", sq.Local(5))
    )
    assert [part.name for part in added.addends] == ["local", "keep", "linear"]


def test_a_method_and_its_text_are_not_added(unchecked):
    with pytest.raises(TypeError, match="unsupported operand"):
        sq.Local() + "keep"


def test_sums_stand_inside_mixed_heads_and_by_length():
    inputs = qkv(30, H=4)
    mixed = sq.parse_method("mixed-heads:methods=3*(local:window=2+keep:first)+full")
    assert mixed.methods == "3*(local:window=2+keep)+full"
    assert mixed == sq.MixedHeads.from_parts(("local:window=2+keep", 3), ("full", 1)) == sq.parse_method(str(mixed))
    alone = sq.attention(*(x[:, :3] for x in inputs), method="local:window=2+keep")
    torch.testing.assert_close(mixed(*inputs)[:, :3], alone)
    steps = sq.ByLength({0: "full", 20: "local:window=2,positions=none+keep"})
    assert steps.steps == "0:full+20:(local:window=2+keep)"
    assert steps == sq.parse_method("by-length:steps=0:full+20:local:window=2+keep") == sq.parse_method(str(steps))
    torch.testing.assert_close(steps(*inputs), sq.attention(*inputs, method="local:window=2+keep"))


@pytest.mark.parametrize(("text", "message"), [
    ("locl+keep", "no method 'locl'; did you mean 'local'"),
    ("local:width=3+keep", "'local' has no setting 'width'"),
    ("local:window=x+keep", "'local': window='x' is not a whole number"),
    ("local:window+keep", "write settings as local:setting=value, not 'window'"),
    ("local", "only 'local' is named, which needs no sum"),
    ("", "a method is missing"),
    ("local+", "a method is missing next to a '\\+'"),
    ("+local", "a method is missing next to a '\\+'"),
    ("local+keep+local", "'local' is named twice"),
    ("keep+keep:every=9", "'keep' and 'keep:every=9' are two lists of kept tokens; write one"),
    ("local+full", "'full' counts every key by itself"),
    ("local:positions=relative+keep", "'local:positions=relative' has terms of the distance"),
    ("adaptive-span+keep", "'adaptive-span' has terms of the distance"),
    ("linear+performer", "'linear' and 'performer' both represent all keys"),
    ("local+nystrom", "'nystrom' has no log-sum-exp"),
    ("local+i-clustered", "'i-clustered' cannot leave out the pairs that 'local' counts; take 'clustered-tail'"),
    ("local+learned-feature-map", "'learned-feature-map' counts near keys itself, .* give it window=0,sinks=0"),
    ("local+(by-length:steps=0:full+9:linear)", "'by-length' divides the heads or the lengths; write the sum inside"),
    ("keep+linformer:sharing=layerwise", "one module for all layers"),
    (
        "local+clustered-tail:window=3",
        "'clustered-tail:window=3' counts near keys itself, of which 'local' counts some; give it window=0",
    ),
    ("lsh:seed=1+clustered:seed=2", "the seeds 1 and 2"),
])  # fmt: skip
def test_a_bad_text_says_what_is_wrong(text, message):
    with pytest.raises(ValueError, match=f"(the sum |terms=){re.escape(repr(text))}[:,] .*{message}") as raised:
        Sum(text)
    assert "\n" not in str(raised.value)


def test_refusals_name_the_part():
    q, k, v = qkv()
    with pytest.raises(ValueError, match=r"'[^']*\+[^']*' does not support a causal mask.*leak"):
        sq.attention(q, k, v, method="local+clustered", is_causal=True)
    with pytest.raises(
        ValueError, match=r"'[^']*\+lha-tail': its part 'lha-tail' has learned parameters, .* only as a bound method"
    ):
        sq.attention(q, k, v, method="local:window=3+keep:first+lha-tail")


# ---------------------------------------------------------------------- what is learned


def test_the_learned_parameters_are_those_of_the_parts():
    layer = bound(sq.parse_method("local:window=3+keep+lha:buckets=3,hidden=8+lha-tail:buckets=4,hidden=4"))
    assert set(layer.learned) == {"0", "3"}
    assert layer.learned["0"].query.weights[0].shape == (2, 8, 8)
    other = bound(layer.method)
    other.load_state_dict(layer.state_dict())


def test_the_auxiliary_loss_is_the_sum_of_the_parts_less_the_kept_tokens():
    inputs = tracked(*qkv())
    layer = bound(sq.parse_method("lha:buckets=3,hidden=8+keep:first=2")).train()
    layer(*inputs)
    alone = sq.parse_method("lha:buckets=3,hidden=8").bind(heads=2, head_dim=8).train()
    alone(*inputs, keep=[0, 1])
    torch.testing.assert_close(layer.auxiliary_loss(), alone.auxiliary_loss())
    assert not sq.parse_method("local+keep").has_auxiliary_loss


def test_what_learns_from_the_output_is_fitted_to_the_sum():
    method = sq.parse_method("local:window=3+learned-feature-map:features=12,window=0,sinks=0")
    layer = bound(method)
    *inputs, call = layer.prepare(*qkv())
    loss = method.fit_loss(*inputs, call)
    grads = torch.autograd.grad(loss, list(layer.parameters()), allow_unused=True)
    assert all(grad is not None and grad.abs().max() > 0 for grad in grads)
    assert method.traits.fit == sq.LearnedFeatureMap.traits.fit


def test_the_centroids_of_routing_follow_the_training():
    layer = bound(sq.parse_method("local:window=2+routing:clusters=3,cluster_size=4")).train()
    before = copy.deepcopy(layer.state_dict())
    layer(*qkv())
    assert any(not torch.equal(before[name], now) for name, now in layer.state_dict().items())


def test_the_seed_of_the_parts_is_the_default():
    inputs = qkv()
    at_five, at_zero = (sq.parse_method(f"keep+lsh:buckets=4,seed={seed}") for seed in (5, 0))
    assert torch.equal(at_five(*inputs), at_zero(*inputs, seed=5))
    assert not torch.allclose(at_five(*inputs), at_zero(*inputs), atol=1e-4)


def test_a_layer_of_sums_learns():
    layer = sq.nn.MultiheadAttention(
        32, 4, method="local:window=4+keep:first+lha-tail:buckets=4,keys=6,cells=3"
    ).train()
    layer(normal(2, 40, 32)).square().sum().backward()
    layer.attention.auxiliary_loss().backward()
    assert all(p.grad is not None for p in layer.parameters())


def test_traits_are_what_all_parts_can_do():
    assert (sq.Local(window=4) + sq.Keep(first=1)).traits.subquadratic
    assert not (sq.Local(window=4) + sq.Keep(every=8)).traits.subquadratic
    assert sq.parse_method("local+keep+performer").traits.causal == "strict"
    assert sq.parse_method("local+clustered-tail").traits.causal == "no"
    assert Sum().traits == Sum.traits


# ---------------------------------------------------------------------- in models


def test_in_a_pretrained_model_saved_and_loaded(tmp_path):
    case = build("bert")
    exact = case.output()
    sq.hf.swap(case.model, "local:window=32+keep:first")  # 17 tokens: all are near
    torch.testing.assert_close(case.output(), exact, atol=1e-5, rtol=1e-5)
    method = sq.Local(window=2) + sq.Keep(first=1) + sq.LinearAttention()
    sq.hf.swap(case.model, method)
    want = case.output()
    assert not torch.allclose(want, exact, atol=1e-3)
    case.model.save_pretrained(tmp_path)
    case.model = type(case.model).from_pretrained(tmp_path).eval()
    assert set(sq.hf.reattach(case.model).methods.values()) == {method}
    torch.testing.assert_close(case.output(), want)
