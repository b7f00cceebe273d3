"""Each group of heads runs its own method, as if alone; what a text of methods may say; what the mix can do."""

import copy
import pickle
import re
from dataclasses import fields

import pytest
import torch

import subquad as sq
from subquad import Mask, MixedHeads, Traits
from subquad.methods.core.mixture import ALL, ANY
from subquad.testing.contract import compile_failures
from subquad.testing.oracle import normal, qkv, tracked
from tests.library.hf.models import build

LHA = "lha:buckets=3;hidden=8"


def bound(method: MixedHeads, heads: int = 4, kv_heads: int | None = None) -> sq.BoundMethod:
    return method.bind(heads=heads, kv_heads=kv_heads, head_dim=8, max_length=64)


# ---------------------------------------------------------------------- the computation


def test_each_part_is_as_if_it_were_alone():
    mixed, inputs = MixedHeads("local:window=3+2*i-clustered:clusters=4;topk=3+oracle-top:topk=2"), qkv(H=4)
    mask = Mask.padding([24, 13])
    out = mixed(*inputs, mask=mask, seed=5)
    for (method, _), heads in zip(mixed.parts, (slice(0, 1), slice(1, 3), slice(3, 4)), strict=True):
        alone = method(*(x[:, heads] for x in inputs), mask=mask, seed=5)
        assert torch.equal(out[:, heads], alone)


def test_the_learned_parameters_are_those_of_the_parts():
    mixed = bound(MixedHeads(f"local:window=3;positions=relative+full+2*{LHA}"))
    assert set(mixed.learned) == {"0", "2"}
    assert mixed.learned["0"].weight.shape == (1, 8, 8)
    assert mixed.learned["2"].query.weights[0].shape == (2, 8, 8)
    inputs = qkv(H=4)
    alone = sq.parse_method(LHA.replace(";", ",")).bind(heads=2, head_dim=8)
    torch.testing.assert_close(mixed(*inputs)[:, 2:], alone(*(x[:, 2:] for x in inputs)))


def test_shared_key_heads_go_with_their_query_heads():
    mixed, (q, k, v) = bound(MixedHeads(f"2*local:window=3+full+{LHA}"), heads=8, kv_heads=4), qkv(H=8, G=4)
    out = mixed(q, k, v)
    for method, heads, keys in (("local:window=3", slice(0, 4), slice(0, 2)), ("full", slice(4, 6), slice(2, 3))):
        part = sq.attention(q[:, heads], k[:, keys], v[:, keys], method=method, enable_gqa=True)
        torch.testing.assert_close(out[:, heads], part)
    assert mixed.learned["2"].key.weights[0].shape[0] == 1


def test_dense_masks_and_biases_are_divided_with_the_heads():
    mixed, inputs = MixedHeads("oracle-top:topk=50+full"), qkv(H=4)
    for heads in (1, 4):
        dense, bias = Mask.dense(normal(2, heads, 24, 24, seed=4) > 0), normal(1, heads, 24, 24, seed=5)
        exact = sq.attention(*inputs, method="full", mask=dense, bias=bias)
        torch.testing.assert_close(mixed(*inputs, mask=dense, bias=bias), exact)


def test_the_auxiliary_loss_is_the_mean_over_the_heads_that_have_one():
    text, inputs = f"local:window=3+{LHA}+2*lha:buckets=5;hidden=4", tracked(*qkv(H=4))
    mixed = bound(MixedHeads(text)).train()
    mixed(*inputs)
    loss = mixed.auxiliary_loss()
    alone = []
    for part, heads in ((LHA, slice(1, 2)), ("lha:buckets=5;hidden=4", slice(2, 4))):
        layer = sq.parse_method(part.replace(";", ",")).bind(heads=heads.stop - heads.start, head_dim=8).train()
        layer(*(x[:, heads] for x in inputs))
        alone.append(layer.auxiliary_loss())
    torch.testing.assert_close(loss, (alone[0] + 2 * alone[1]) / 3)
    learned = list(mixed.learned["2"].parameters())
    *of_inputs, of_learned = torch.autograd.grad(loss, [*inputs, learned[0]], allow_unused=True)
    assert of_inputs == [None, None, None]
    assert of_learned.abs().max() > 0


def test_without_a_part_that_has_one_there_is_no_auxiliary_loss():
    mixed = bound(MixedHeads("local:positions=relative+full")).train()
    mixed(*qkv(H=4))
    assert mixed.auxiliary_loss() is None
    assert mixed.method.traits.fit is None
    assert MixedHeads(f"full+{LHA}").traits.fit == sq.LearnedHash.traits.fit


def test_the_seed_of_the_parts_is_the_default():
    inputs = qkv(H=2)
    at_five, at_zero = (MixedHeads(f"full+clustered:clusters=4;seed={seed}") for seed in (5, 0))
    assert torch.equal(at_five(*inputs), at_zero(*inputs, seed=5))
    assert not torch.allclose(at_five(*inputs), at_zero(*inputs), atol=1e-4)


@pytest.mark.long
def test_compiled_with_shared_key_heads_and_learned_parts():
    methods = [MixedHeads(f"{LHA}+local:window=3;positions=relative"), MixedHeads("full+i-clustered:clusters=4")]
    assert not compile_failures(methods)


# ---------------------------------------------------------------------- the text


@pytest.mark.parametrize(("text", "wanted"), [
    ("local+full", "local+full"),
    (" 2 * local:window=64 + 4*full ", "local+2*full"),
    ("local:window=5,positions=relative+full", "local:window=5;positions=relative+full"),
    ("local:positions=relative;window=5+full", "local:window=5;positions=relative+full"),
    ("local+local+full+full", "local+full"),
    ("local+full+full+full", "local+3*full"),
    ("local+full+local", "local+full+local"),
    ("lha:enlarge=1e+20+local", "lha:enlarge=1e+20+local"),
])  # fmt: skip
def test_every_spelling_becomes_one(text, wanted):
    method = MixedHeads(text)
    assert method.methods == wanted
    assert method == MixedHeads(wanted)
    assert hash(method) == hash(MixedHeads(wanted))
    assert sq.parse_method(str(method)) == method
    assert sq.from_dict(method.to_dict()) == method
    assert pickle.loads(pickle.dumps(method)) == copy.deepcopy(method) == method
    assert copy.deepcopy(method).parts == method.parts


def test_of_takes_names_and_objects():
    mixed = MixedHeads.from_parts((sq.Local(window=5), 3), ("lha:buckets=4,hash=linear", 1))
    assert mixed == MixedHeads("3*local:window=5+lha:buckets=4;hash=linear")
    assert [(str(part.method), part.share) for part in mixed.parts] == [
        ("local:window=5", 3), ("lha:buckets=4,hash=linear", 1),
    ]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), [
    ("locl+full", "no method 'locl'; did you mean 'local'"),
    ("local:width=3+full", "'local' has no setting 'width'"),
    ("local:window=x+full", "'local': window='x' is not a whole number"),
    ("local", "only 'local' is named"),
    ("local+2*local", "only 'local' is named"),
    ("", "no method ''"),
    ("local+", "a method is missing next to a '\\+'"),
    ("0*local+full", "the share of 'local' is '0', not a whole number"),
    ("1.5*local+full", r"the share of 'local' is '1\.5'"),
    ("mixed-heads+full", "'mixed-heads' inside itself"),
    ("local+linformer:sharing=layerwise", "one module for all layers"),
    ("clustered:seed=1+i-clustered:seed=2", "the seeds 1 and 2"),
])  # fmt: skip
def test_a_bad_text_says_what_is_wrong(text, message):
    with pytest.raises(ValueError, match=f"'mixed-heads': methods={re.escape(repr(text))}, but it must be .*{message}"):
        MixedHeads(text)


# ---------------------------------------------------------------------- the heads


def test_heads_that_do_not_divide_are_named():
    mixed = MixedHeads("3*local+full")
    with pytest.raises(ValueError, match=r"'mixed-heads:methods=3\*local\+full' deals .* 4 equal shares, .* 6 heads"):
        mixed(*qkv(H=6))
    with pytest.raises(ValueError, match="4 equal shares, but there are 6 heads"):
        bound(mixed, heads=6)


def test_key_heads_are_not_divided():
    with pytest.raises(ValueError, match=r"8 heads after head 6.* 2 key heads serves 4"):
        bound(MixedHeads("3*local+full"), heads=8, kv_heads=2)


# ---------------------------------------------------------------------- what it can do


def test_every_trait_that_is_yes_or_no_is_combined():
    by_name = {f.name for f in fields(Traits) if isinstance(getattr(sq.Full.traits, f.name), bool)}
    not_offered = {"one_for_all_layers", "recurrent"}
    # A mixture's `attend` is its own: what its parts do with padding and segments says nothing of it.
    its_own = {"cached", "zeroes_padding", "skips_padding", "takes_segments"}
    assert set(ALL) | set(ANY) | not_offered | its_own == by_name
    assert not set(ALL) & set(ANY)


@pytest.mark.parametrize(("text", "causal", "cross", "cached", "learned", "order_free"), [
    ("local+full", "strict", False, True, False, False),
    ("full+oracle-top", "strict", True, True, False, True),
    ("full+lha", "values-only", True, True, True, True),
    ("local+smyrf", "no", False, True, False, False),
    ("local+shared-full", "strict", False, False, False, False),
    ("local:positions=relative+full", "strict", False, True, True, False),
])  # fmt: skip
def test_traits_are_what_all_parts_can_do(text, causal, cross, cached, learned, order_free):
    traits = MixedHeads(text).traits
    assert (traits.causal, traits.cross, traits.cached) == (causal, cross, cached)
    assert (traits.learned, traits.order_free) == (learned, order_free)


def test_the_traits_of_the_class_are_those_of_the_default():
    assert MixedHeads().traits == MixedHeads.traits
    assert MixedHeads().traits.fit == MixedHeads.traits.fit
    assert all(name in MixedHeads.traits.complexity for name in ("local: O(", "lha: O("))


def test_refusals_name_the_part():
    inputs = qkv(H=4)
    with pytest.raises(ValueError, match=r"'mixed-heads' does not support a window; .*another method for 'clustered'"):
        MixedHeads("local+clustered")(*inputs, mask=Mask.window(3))
    q, k, v = qkv(24, 30, H=4)
    cached = bound(MixedHeads("full+lha"))
    with pytest.raises(ValueError, match="does not support what its part 'lha' refuses: 'lha' ties the hashes"):
        cached(q, k, v, mask=Mask.causal(offset=6))
    assert MixedHeads("local+full").refuses(Mask.causal() & Mask.window(3)) is None


# ---------------------------------------------------------------------- in models


def test_in_a_layer():
    layer = sq.nn.MultiheadAttention(32, 4, method=MixedHeads(f"local:window=4;positions=relative+{LHA}")).train()
    layer(normal(2, 40, 32)).square().sum().backward()
    read = {name for name, p in layer.attention.named_parameters() if p.grad is not None}
    assert read == {"learned.0.content", "learned.0.position", "learned.0.weight"}  # hashes learn from their own loss


def test_in_a_pretrained_model():
    case = build("bert")
    exact = case.output()
    sq.hf.swap(case.model, "mixed-heads:methods=local:window=32+i-clustered:clusters=25")
    torch.testing.assert_close(case.output(), exact, atol=1e-5, rtol=1e-5)  # 17 tokens: both parts are exact
    sq.hf.swap(case.model, "mixed-heads:methods=local:window=2+i-clustered:clusters=3;topk=2")
    assert not torch.allclose(case.output(), exact, atol=1e-3)


def test_it_survives_saving_and_loading(tmp_path):
    case = build("bert")
    method = MixedHeads("3*local:window=2+clustered:clusters=3")
    sq.hf.swap(case.model, method)
    want = case.output()
    case.model.save_pretrained(tmp_path)
    case.model = type(case.model).from_pretrained(tmp_path).eval()
    assert set(sq.hf.reattach(case.model).methods.values()) == {method}
    torch.testing.assert_close(case.output(), want)


def test_a_model_whose_heads_do_not_divide_stays_as_it_is():
    case = build("bert")
    with pytest.raises(ValueError, match="3 equal shares, but there are 4 heads"):
        sq.hf.swap(case.model, "mixed-heads:methods=2*local+full")
    assert case.model.config._attn_implementation == "eager"
