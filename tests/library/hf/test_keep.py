"""Kept tokens in Hugging Face models: the first, the first and the last, or those that a mask names."""

import json

import pytest
import torch
import transformers as hf

import subquad as sq
from subquad.testing.contract import close
from subquad.tools.measure.capture import recorded
from tests.library.hf.models import TEXT, build, padded_ids

METHOD = "local:window=2"
METHODS = (METHOD, "i-clustered:clusters=3,topk=2", "clustered-tail:clusters=3,topk=2,cells=2", "smyrf:clusters=4")


def bert(layers: int = 1) -> hf.BertModel:
    torch.manual_seed(0)
    model = hf.BertModel(hf.BertConfig(**(TEXT | {"num_hidden_layers": layers}))).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(3.0)
    return model


def hidden(model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=ids, attention_mask=mask).last_hidden_state


def apart(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The largest difference at each token."""
    return (a - b).abs().amax(-1)


# ---------------------------------------------------------------------- what comes out


@pytest.mark.parametrize("text", METHODS)
@pytest.mark.parametrize("side", ["right", "left"])
def test_the_first_tokens_row_is_exact_in_one_layer(text, side):
    """In one layer a token's output depends on the other tokens through its own row alone."""
    model, (ids, mask) = bert(), padded_ids(side)
    exact = hidden(model, ids, mask)
    first, last = ([0, 0], [16, 10]) if side == "right" else ([0, 6], [16, 16])
    items = torch.arange(2)
    for keep, kept in ((None, []), ("first", [first]), ("ends", [first, last])):
        sq.hf.swap(model, text, keep=keep)
        far = apart(hidden(model, ids, mask), exact)
        for tokens in kept:
            assert (far[items, tokens] < 1e-5).all()
        others = [tokens for tokens in (first, last) if tokens not in kept]
        assert all((far[items, tokens] > 1e-4).any() for tokens in others)
        assert (far[mask.bool()] > 1e-4).any()


def test_every_query_meets_the_first_key():
    """The first token, which a window is too narrow to reach, changes all tokens when its key is kept."""
    model, (ids, _) = bert(), padded_ids(pads=0)
    other = ids.clone()
    other[:, 0] = (ids[:, 0] + 7) % 50 + 5
    for keep, reaches in ((None, False), ("first", True)):
        sq.hf.swap(model, METHOD, keep=keep)
        assert bool((apart(hidden(model, ids), hidden(model, other))[:, 8:] > 1e-5).all()) == reaches


@pytest.mark.parametrize("text", METHODS)
@pytest.mark.parametrize("keep", ["first", "ends"])
def test_padding_changes_nothing(text, keep):
    model, (ids, mask) = bert(2), padded_ids()
    sq.hf.swap(model, text, keep=keep)
    close(hidden(model, ids, mask)[1, :11], hidden(model, ids[1:, :11])[0])


def test_each_packed_sequence_has_ends_of_its_own():
    case = build("llama")
    sq.hf.swap(case.model, METHOD, keep="ends")
    ids, _ = padded_ids(pads=0, batch=1)
    positions = torch.cat([torch.arange(9), torch.arange(8)])[None]
    with torch.inference_mode():
        packed = case.model(input_ids=ids, position_ids=positions, use_cache=False).logits
        alone = [case.model(input_ids=part, use_cache=False).logits for part in (ids[:, :9], ids[:, 9:])]
    close(packed, torch.cat(alone, dim=1))


def test_a_mask_names_tokens_for_a_while():
    model, (ids, mask) = bert(), padded_ids()
    exact = hidden(model, ids, mask)
    sq.hf.swap(model, METHOD, keep="first")
    before = hidden(model, ids, mask)
    named = torch.zeros_like(mask, dtype=torch.bool)
    named[0, [3, 9]] = named[1, 5] = named[1, 16] = True  # the last one is padding
    with sq.hf.keeping(model, named):
        far = apart(hidden(model, ids, mask), exact)
        with sq.hf.keeping(model, named & False):
            assert (apart(hidden(model, ids, mask), exact)[:, 0] > 1e-4).any()
        close(apart(hidden(model, ids, mask), exact), far)
    named[1, 16] = False
    assert (far[named] < 1e-5).all()
    assert (far[:, 0] > 1e-4).any()  # in place of what `swap` was told to keep
    assert torch.equal(hidden(model, ids, mask), before)


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_gradient_checkpointing_backward_belongs_inside_the_block(reentrant):
    model, (ids, mask) = bert().train(), padded_ids()
    named = torch.zeros_like(mask, dtype=torch.bool)
    named[:, 9] = True
    sq.hf.swap(model, METHOD, keep="first")
    weight = model.encoder.layer[0].attention.self.query.weight

    def loss() -> torch.Tensor:
        torch.manual_seed(0)  # of dropout
        return model(input_ids=ids, attention_mask=mask).last_hidden_state.sum()

    with sq.hf.keeping(model, named):
        (expected,) = torch.autograd.grad(loss(), weight)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        inside = loss()
        inside.backward()
        close(weight.grad, expected)
        outside = loss()
    with pytest.raises(ValueError, match="call backward inside its block"):
        outside.backward()
    loss().backward()


def test_layers_in_full_are_left_alone_in_models_with_cross_attention_and_windows():
    bart = build("bart")
    with torch.inference_mode():
        exact = bart.output()
        sq.hf.swap(bart.model, {"*.encoder.layers.*": METHOD}, keep="ends")
        assert not torch.allclose(bart.output(), exact, atol=1e-4)
        names = {layer.number: layer.name for layer in sq.hf.describe(bart.model).layers}
        assert any("encoder_attn" in name for name in names.values())
    modern = build("modernbert")
    sq.hf.swap(modern.model, {0: METHOD}, keep="first")
    assert sq.hf.describe(modern.model).keep == "first"


def test_gradients_are_finite():
    model, (ids, mask) = bert(2), padded_ids()
    sq.hf.swap(model, METHOD, keep="ends")
    model(input_ids=ids, attention_mask=mask).last_hidden_state.square().sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_recording_the_layers_leaves_it_as_it_was():
    model, (ids, mask) = bert(), padded_ids()
    sq.hf.swap(model, METHOD, keep="ends")
    before = hidden(model, ids, mask)
    with recorded(model):
        hidden(model, ids, mask)
    assert sq.hf.describe(model).keep == "ends"
    assert torch.equal(hidden(model, ids, mask), before)


def test_the_table_says_what_is_kept():
    model = bert()
    assert str(sq.hf.swap(model, METHOD, keep="ends")).endswith(
        "exact in every layer: each item's first and last token"
    )
    assert "exact" not in str(sq.hf.swap(model, METHOD))
    assert sq.hf.describe(model).keep is None


# ---------------------------------------------------------------------- files


@pytest.mark.parametrize("keep", [None, "first", "ends"])
def test_it_is_saved_with_the_swap(tmp_path, keep):
    model, (ids, mask) = bert(2), padded_ids()
    sq.hf.swap(model, METHOD, keep=keep)
    model.save_pretrained(tmp_path)
    record = json.loads((tmp_path / "config.json").read_text())["subquad"]
    assert record.get("keep") == keep
    assert ("keep" in record) == (keep is not None)  # records without it are those of earlier versions
    loaded = hf.AutoModel.from_pretrained(tmp_path).eval()
    assert sq.hf.describe(loaded).keep == keep
    assert torch.equal(hidden(loaded, ids, mask), hidden(model, ids, mask))
    sq.hf.restore(loaded)
    assert not hasattr(loaded.config, "subquad")


@pytest.mark.parametrize("damaged", ["last", 3, ["first"]])
def test_a_damaged_record_is_named(damaged):
    model = bert()
    sq.hf.swap(model, METHOD, keep="first")
    model.config.subquad["keep"] = damaged
    with pytest.raises(ValueError, match=r"record of a swap is damaged: ValueError: keep="):
        sq.hf.reattach(model)


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("name", "method", "message"),
    [
        (
            "bart",
            {"*encoder_attn*": "lsh:buckets=4"},
            "this is cross-attention, and tokens are kept in self-attention only",
        ),
        ("modernbert", METHOD, "this layer attends to a window only, which a kept token would see beyond"),
        ("bert", "nystrom", "'nystrom' does not support `keep`, which needs its log-sum-exp"),
    ],
)
def test_what_cannot_keep_tokens_is_refused_and_nothing_changes(name, method, message):
    case = build(name)
    before = case.output()
    with pytest.raises(ValueError, match=message):
        sq.hf.swap(case.model, method, keep="first")
    assert torch.equal(case.output(), before)
    if name != "bart":  # the decoder is causal
        sq.hf.swap(case.model, method)
        with pytest.raises(ValueError, match=f"layer 0|1 .* cannot keep tokens: {message}"):
            sq.hf.keeping(case.model, torch.ones(2, 17, dtype=torch.bool)).__enter__()


def test_mistakes_are_named():
    model, (ids, mask) = bert(), padded_ids()
    with pytest.raises(ValueError, match=r"keep='last', but it must be 'first' or 'ends' or None; .* sq\.hf\.keeping"):
        sq.hf.swap(model, METHOD, keep="last")
    with pytest.raises(ValueError, match="nothing is swapped into this BertModel"), sq.hf.keeping(model, mask.bool()):
        pass
    sq.hf.swap(model, METHOD)
    with pytest.raises(TypeError, match=r"must be a bool tensor \(batch, tokens\), got torch\.int64 \(2, 17\)"):
        sq.hf.keeping(model, mask).__enter__()
    columns = "`keep` has 9 columns but the query has 17 positions; they must match"
    with pytest.raises(ValueError, match=columns), sq.hf.keeping(model, torch.ones(2, 9, dtype=torch.bool)):
        hidden(model, ids, mask)
    rows = "`keep` has 3 rows but the batch is 2; they must match"
    with pytest.raises(ValueError, match=rows), sq.hf.keeping(model, torch.ones(3, 17, dtype=torch.bool)):
        hidden(model, ids, mask)
    hidden(model, ids, mask)


def test_caches_are_refused_and_generating_without_one_works():
    model = build("llama").model
    ids, _ = padded_ids(pads=0)
    sq.hf.swap(model, METHOD, keep="first")
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    with pytest.raises(ValueError, match="there are 1 queries and 18 keys: generate with use_cache=False"):
        model.generate(ids, **options)
    assert model.generate(ids, use_cache=False, **options).shape == (2, 20)
    sq.hf.swap(model, "linear", keep="first")
    with pytest.raises(ValueError, match="cannot keep tokens on a StateCache"):
        model.generate(ids, past_key_values=sq.hf.StateCache(model), **options)


def test_causal_layers_keep_the_first_token():
    case = build("llama")
    sq.hf.swap(case.model, METHOD, keep="first")
    ids, _ = padded_ids(pads=0)
    with torch.inference_mode():
        whole = case.model(input_ids=ids, use_cache=False).logits
        part = case.model(input_ids=ids[:, :9], use_cache=False).logits
    close(whole[:, :9], part)
