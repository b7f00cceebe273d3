import copy
import inspect

import pytest
import torch

import subquad as sq
from subquad.testing.oracle import qkv


@pytest.mark.parametrize("method", ["clustered:clusters=5", sq.Clustered(clusters=5)])
def test_a_method_is_a_name_or_an_object(method):
    q, k, v = qkv()
    assert torch.equal(sq.attention(q, k, v, method=method), sq.Clustered(clusters=5)(q, k, v))


def test_every_option_reaches_the_method():
    q, k, v = qkv(H=4, G=2)
    options = {"mask": sq.Mask.padding([24, 9]), "scale": 0.2, "enable_gqa": True, "seed": 4}
    method = sq.ImprovedClustered(clusters=5, topk=3)
    out = sq.attention(q, k, v, method=method, **options)
    assert torch.equal(out, method(q, k, v, **options))
    for option in options:
        if option != "enable_gqa":
            assert not torch.equal(out, method(q, k, v, **{k: v for k, v in options.items() if k != option}))


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(ValueError, match=r"no method 'cluster'; did you mean 'clustered'\? `subquad methods` lists"):
        sq.attention(*qkv(), method="cluster")


def test_a_keyword_that_a_method_does_not_have_is_answered_with_the_nearest_one():
    with pytest.raises(TypeError, match=r"^'clustered-tail' has no setting 'cluster'; did you mean 'clusters'\?"):
        sq.ClusteredTail(cluster=64)
    made = sq.ClusteredTail(64, topk=8)
    assert made == sq.parse_method("clustered-tail:clusters=64,topk=8") == copy.deepcopy(made)
    assert next(iter(inspect.signature(sq.ClusteredTail).parameters)) == "clusters"  # what `help` shows


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("clustered:clusters", "write settings as clustered:setting=value, not 'clusters'"),
        ("clustered:cluster=3", r"'clustered' has no setting 'cluster'; did you mean 'clusters'\?"),
        ("full:topk=3", "'full' has no setting 'topk'; it has positions"),
        ("clustered:clusters=three", r"clusters='three' is not a whole number \(default: 100\)"),
        ("clustered-tail:block=64,block=32", "'clustered-tail:block=64,block=32' sets block twice; give it once"),
        ("mixed-heads:methods=local:window=3;window=5+full", "'local:window=3;window=5' sets window twice"),
        ("local:window=4,window=4+keep", "'local:window=4,window=4' sets window twice"),
        ("clustered:bits=64", "'clustered': bits=64, but a hash is one 64-bit word: at most 63"),
        ("i-clustered:bits=64", "'i-clustered': bits=64, but a hash"),
    ],
)
def test_bad_settings_say_what_is_wrong(text, message):
    with pytest.raises(ValueError, match=message):
        sq.parse_method(text)


def test_a_dict_needs_a_name(unchecked):
    with pytest.raises(ValueError, match=r"needs its 'name'; got \['clusters'\]"):
        sq.from_dict({"clusters": 3})
    with pytest.raises(TypeError, match=r"a dict with its 'name', got str; .*use sq.parse_method"):
        sq.from_dict("local")


@pytest.mark.parametrize("shape", [(1, 1, 5), (3, 1, 5, 7), (1, 3, 5, 7), (1, 1, 1, 7), (1, 1, 5, 1)], ids=str)
def test_a_bias_that_does_not_fit_is_refused(shape):
    q, k, v = qkv(5, 7)
    with pytest.raises((ValueError, TypeError), match=r"bias"):
        sq.attention(q, k, v, method="full", bias=torch.zeros(shape))


def test_a_bias_is_a_floating_tensor_on_the_same_device():
    q, k, v = qkv(5)
    with pytest.raises(TypeError, match="bias"):
        sq.attention(q, k, v, method="full", bias=torch.zeros(1, 1, 5, 5).bool())
    with pytest.raises(ValueError, match="`bias` is on meta but `query` is on cpu"):
        sq.attention(q, k, v, method="full", bias=torch.zeros(1, 1, 5, 5, device="meta"))
