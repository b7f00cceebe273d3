"""Each item, and each query of a causal call, runs the method of its own length; what a text of steps may say."""

import copy
import pickle

import pytest
import torch

import subquad as sq
from subquad import ByLength, Mask
from subquad.methods.by_length import visible_keys
from subquad.testing.contract import compile_failures
from subquad.testing.oracle import normal, qkv
from tests.library.hf.models import build

THREE = "0:full+9:performer:features=8+17:local:window=3"


def items(mask_of: int) -> torch.Tensor:
    return torch.arange(24) < mask_of


# ---------------------------------------------------------------------- the choice


@pytest.mark.parametrize(("keys", "method"), [
    (1, "full"), (8, "full"), (9, "performer:features=8"), (16, "performer:features=8"), (17, "local:window=3"),
    (500, "local:window=3"),
])  # fmt: skip
def test_a_step_starts_at_its_number_of_keys(keys, method):
    assert str(ByLength(THREE).method_at(keys)) == method
    inputs = qkv(min(keys, 40))
    assert torch.equal(
        ByLength(THREE)(*inputs), sq.attention(*inputs, method=ByLength(THREE).method_at(inputs[0].shape[2]))
    )


def test_each_item_of_a_batch_runs_what_it_would_run_alone():
    lengths = (24, 3, 12, 17)
    q, k, v = qkv(24, B=4)
    out, lse = ByLength(THREE)(q, k, v, mask=Mask.padding(lengths), return_lse=True)
    for item, n in enumerate(lengths):
        own = [x[item : item + 1, :, :n] for x in (q, k, v)]
        method = ByLength(THREE).method_at(n)
        alone, alone_lse = method(*own, return_lse=True)
        torch.testing.assert_close(out[item : item + 1, :, :n], alone)
        torch.testing.assert_close(lse[item : item + 1, :, :n], alone_lse)


def test_dense_masks_and_biases_of_items_go_with_them():
    method, inputs = ByLength("0:full+9:oracle-top:topk=40"), qkv(24, B=3)
    dense, bias = Mask.dense(normal(3, 1, 24, 24, seed=4) > 0), normal(3, 2, 24, 24, seed=5)
    mask = dense & Mask.padding([24, 5, 9])
    exact = sq.attention(*inputs, method="full", mask=mask, bias=bias)
    torch.testing.assert_close(method(*inputs, mask=mask, bias=bias), exact)


def test_under_a_causal_mask_each_query_counts_its_own_keys():
    inputs, method = qkv(24), ByLength(THREE)
    out = method(*inputs, is_causal=True)
    for rows, text in (
        (slice(0, 8), "full"),
        (slice(8, 16), "performer:features=8"),
        (slice(16, 24), "local:window=3"),
    ):
        own = sq.attention(*inputs, method=text, is_causal=True)
        torch.testing.assert_close(out[:, :, rows], own[:, :, rows])


@pytest.mark.parametrize("mask", [Mask.causal(), Mask.padding([24, 10])])
def test_a_start_that_no_int64_holds_is_never_reached(mask):
    inputs, huge = qkv(24, B=2), ByLength({0: "local:window=3", 10**26: "full"})
    wanted = sq.attention(*inputs, method="local:window=3", mask=mask)
    assert torch.equal(huge(*inputs, mask=mask), wanted)


def test_the_keys_that_queries_see_are_counted_as_the_dense_mask_has_them():
    left = ~items(10)[None].expand(2, -1)
    for mask in (
        Mask.padding([24, 5]),
        Mask.causal() & Mask.padding(left),
        Mask.causal(offset=3) & Mask.padding(keys=left),
        Mask.causal(offset=torch.tensor([2, 9])),
        Mask.causal(offset=torch.tensor([2, 9])) & Mask.padding(keys=[24, 5]),
    ):
        N = 24 if mask.both or mask.offset is None else 10
        wanted = Mask(is_causal=mask.is_causal, offset=mask.offset, keys=mask.keys + mask.both).to_dense(N, 24)
        seen = visible_keys(mask, N, 24, left.device).expand(2, N)
        assert torch.equal(seen, wanted.sum(-1)[:, 0].expand(2, N)), mask


def test_what_cannot_be_read_is_computed_for_all_and_selected():
    q, k, v = qkv(24, B=2)
    method, mask = ByLength("0:full+9:clustered:clusters=4"), Mask.padding(torch.stack([items(24), items(5)]))

    def alone(q, k, v, valid):
        return method(q[None], k[None], v[None], mask=Mask.padding(valid[None]))[0]

    mapped = torch.vmap(alone, randomness="same")(q, k, v, mask.both[0])
    torch.testing.assert_close(mapped, method(q, k, v, mask=mask))


@pytest.mark.long
def test_compiled_with_every_length_and_with_learned_parts():
    assert not compile_failures([ByLength("0:clustered:clusters=3+10:lha:buckets=3;hidden=8"), ByLength(THREE)])


def test_the_learned_parameters_are_those_of_the_steps():
    method = ByLength("0:full+10:lha:buckets=3;hidden=8+20:local:positions=relative;window=4")
    bound = method.bind(heads=2, head_dim=8, max_length=64)
    assert set(bound.learned) == {"1", "2"}
    inputs = qkv(15)
    alone = sq.parse_method("lha:buckets=3,hidden=8").bind(heads=2, head_dim=8)
    torch.testing.assert_close(bound(*inputs), alone(*inputs))
    for each in (bound, alone):
        each.train()(*inputs)
    loss = bound.auxiliary_loss()
    torch.testing.assert_close(loss, alone.auxiliary_loss())
    assert loss.requires_grad
    bound(*qkv(24))
    assert bound.auxiliary_loss() is None


def test_in_a_model_short_inputs_stay_exact():
    built = build("bert")
    own = built.model(**built.inputs).last_hidden_state
    sq.hf.swap(built.model, ByLength({0: "full", 1000: "performer"}))
    torch.testing.assert_close(built.model(**built.inputs).last_hidden_state, own)
    sq.hf.swap(built.model, ByLength({0: "full", 2: "performer"}))
    assert not torch.allclose(built.model(**built.inputs).last_hidden_state, own, atol=1e-3)


# ---------------------------------------------------------------------- the text


@pytest.mark.parametrize(("steps", "wanted"), [
    ("0:full+700:local", "0:full+700:local"),
    (" 0 : full + 700 : local:window=64,positions=relative", "0:full+700:local:positions=relative"),
    ("0:full+5:full+9:local+30:local", "0:full+9:local"),
    ("0:full", "0:full"),
    ({0: "full", 700: sq.Local(window=5)}, "0:full+700:local:window=5"),
    ({0: "full", 700: "full", 70: "local:window=5"}, "0:full+70:local:window=5+700:full"),
    ({70: "local:window=5", 0: "full"}, "0:full+70:local:window=5"),
    ({0: "lha:enlarge=1e+20", 9: "full"}, "0:lha:enlarge=1e+20+9:full"),
])  # fmt: skip
def test_every_spelling_becomes_one(steps, wanted):
    method = ByLength(steps)
    assert method.steps == wanted
    assert method == ByLength(wanted)
    assert hash(method) == hash(ByLength(wanted))
    assert sq.parse_method(str(method)) == method
    assert sq.from_dict(method.to_dict()) == method
    assert pickle.loads(pickle.dumps(method)) == copy.deepcopy(method) == method
    assert copy.deepcopy(method).at == method.at


@pytest.mark.parametrize(("steps", "message"), [
    ("0:locl", "no method 'locl'; did you mean 'local'"),
    ("0:local:width=3", "'local' has no setting 'width'"),
    ("full", "'full' is not a number of keys, a ':' and a method"),
    ("", "'' is not a number of keys"),
    ("5:full", "start at 5 keys, but they must start at 0 and grow"),
    ("0:full+9:local+9:linear", "start at 0, 9, 9 keys"),
    ("0:full+9:local+3:linear", "start at 0, 9, 3 keys"),
    ("0:full+9:mixed-heads", "'mixed-heads' is a mixture itself"),
    ("0:clustered:seed=1+9:i-clustered:seed=2", "the seeds 1 and 2"),
    ({}, "'' is not a number of keys"),
    ({0: "full", -1: "local"}, "-1 is not a whole number of keys"),
    ({0: "full", 2.5: "local"}, "2.5 is not a whole number of keys"),
    ({0: "ful"}, "no method 'ful'"),
])  # fmt: skip
def test_what_are_no_steps_is_refused(steps, message):
    with pytest.raises(ValueError, match=r"'by-length': steps=.* but it must be") as error:
        ByLength(steps)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_mixture_inside_mixed_heads_is_refused():
    with pytest.raises(ValueError, match="'by-length' is a mixture itself"):
        sq.MixedHeads("full+by-length")


def test_the_refusal_names_the_method_that_refuses():
    with pytest.raises(ValueError, match=r"'by-length' does not support a causal mask.*another method for 'smyrf'"):
        ByLength({0: "full", 3: "smyrf"})(*qkv(5), is_causal=True)
    with pytest.raises(ValueError, match=r"'by-length' is not causal \(its part 'smyrf' is not\)"):
        sq.hf.swap(build("llama").model, ByLength({0: "full", 9: "smyrf"}))
