"""Tests of what a trial of a model finds: layers as they are, and models that would differ, refused when swapped."""

import copy

import pytest
import torch
import transformers as hf
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import subquad as sq
from tests.library.hf.models import TEXT, build, padded_ids

MARKS = {"num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}


class Attention(nn.Module):
    """Self-attention of one head by transformers' interface, and a place to do something wrong in."""

    is_causal = False

    def __init__(self, config):
        super().__init__()
        self.config = config

    def forward(self, x, attention_mask, **options):
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        return attend(self, x[:, None], x[:, None], x[:, None], attention_mask, scaling=1.0, **options)[0].flatten(2)


def eager_attention_forward(module, query, key, value, attention_mask, scaling, **_):
    weights = query @ key.mT * scaling
    weights = (weights if attention_mask is None else weights + attention_mask).softmax(-1)
    out = (weights @ value).transpose(1, 2)
    return out + value.mean(2)[:, None] if module.config.model_type == "more" else out, weights


class Model(hf.PreTrainedModel):
    config_class = hf.BertConfig
    _supports_sdpa = _supports_attention_backend = True

    def __init__(self, config):
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.attention = Attention(config)
        self.post_init()

    def get_input_embeddings(self):
        return self.embeddings

    def forward(self, input_ids, attention_mask=None):
        x = self.embeddings(input_ids)
        mask = hf.masking_utils.create_bidirectional_mask(self.config, x, attention_mask)
        return self.finish(self.attention(x, mask), mask)

    def finish(self, x, mask):
        return (x,)


class ReadsTheMask(Model):
    def finish(self, x, mask):
        return (x if mask is None else x * mask[:, 0, -1, :, None],)


class OtherWithoutEager(Model):
    def finish(self, x, mask):
        return (x if self.config._attn_implementation == "eager" else 2 * x,)


class KnowsEagerAlone(Model):
    """Runs on its own attention only, where padding is on the left: a trial that not every model must pass."""

    def forward(self, input_ids, attention_mask=None):
        left = attention_mask is not None and not attention_mask[:, 0].all()
        if left and self.config._attn_implementation != "eager":
            raise KeyError("no such attention")
        return super().forward(input_ids, attention_mask)


def small(cls=Model, kind="bert"):
    torch.manual_seed(0)
    config = hf.BertConfig(**TEXT)
    config.model_type = kind
    model = cls(config).eval()
    model.set_attn_implementation("eager")
    return model


def test_a_model_of_ones_own_is_tried_and_swapped():
    model = small()
    swapped = sq.hf.swap(model, "clustered:clusters=3")
    assert swapped.layers[0].sizes == (1, 1, 32)


def test_a_trial_under_autocast_is_that_outside_of_it():
    torch.manual_seed(0)
    settings = {"num_key_value_heads": 2, "head_dim": 32, "initializer_range": 0.3}
    model = hf.Gemma2Model(hf.Gemma2Config(**TEXT | settings)).eval()  # caps its logits
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert len(sq.hf.swap(model, "full").layers) == TEXT["num_hidden_layers"]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: small(ReadsTheMask), r"its own code computes with the attention mask \(mul in ReadsTheMask\)"),
        (lambda: small(OtherWithoutEager), "a part of it depends on the attention implementation"),
        (lambda: small(KnowsEagerAlone), r"KeyError: 'no such attention' \(tried with padding on the left\)"),
        (lambda: small(kind="more"), r"layer 0 \(attention\) computes more than softmax attention"),
    ],
)
def test_a_model_that_would_not_be_the_same_is_refused_and_left_alone(model, message):
    model = model()
    ids, mask = padded_ids()
    before = model(ids, mask)[0]
    with pytest.raises(ValueError, match=message):
        sq.hf.swap(model, "full")
    assert model.config._attn_implementation == "eager"
    assert not any(name.endswith("subquad") for name, _ in model.named_modules())
    assert torch.equal(model(ids, mask)[0], before)


def test_causality_is_that_of_the_mask_function_and_not_of_the_attribute():
    model = build("llama").model
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    ids, _ = padded_ids(pads=0)
    want = model(input_ids=ids).logits
    assert [layer.causal for layer in sq.hf.find_layers(model)] == [True, True]
    with pytest.raises(ValueError, match="is not causal and this layer is"):
        sq.hf.swap(model, "smyrf")
    sq.hf.swap(model, "full")
    torch.testing.assert_close(model(input_ids=ids).logits, want, atol=1e-5, rtol=1e-5)


def test_a_decoder_asked_to_attend_both_ways_is_not_causal():
    config = hf.LlamaConfig(**TEXT, **MARKS, is_causal=False)
    model = hf.LlamaModel(config).eval()
    ids, mask = padded_ids()
    want = model(input_ids=ids, attention_mask=mask).last_hidden_state
    assert sq.hf.refusals(model, "clustered") == {}
    sq.hf.swap(model, "full")
    torch.testing.assert_close(model(input_ids=ids, attention_mask=mask).last_hidden_state, want)


def test_the_causality_of_clips_text_tower_is_seen_when_swapping():
    text = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = hf.CLIPTextModel(hf.CLIPTextConfig(**text, vocab_size=60, max_position_embeddings=20, eos_token_id=2))
    assert all("is not causal" in reason for reason in sq.hf.refusals(model, "smyrf").values())
    assert len(sq.hf.refusals(model, "smyrf")) == 2


def test_widths_are_those_that_the_layer_gives():
    """DeepSeek's multi-head latent attention: values narrower than queries and keys, which the config does not say."""
    config = hf.DeepseekV3Config(
        **TEXT, num_key_value_heads=4, n_routed_experts=4, n_group=1, topk_group=1, num_experts_per_tok=2,
        moe_intermediate_size=16, q_lora_rank=16, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6,
        first_k_dense_replace=1,
    )  # fmt: skip
    model = hf.DeepseekV3Model(config).eval()
    ids, mask = padded_ids(side="left")
    want = model(input_ids=ids, attention_mask=mask).last_hidden_state[mask.bool()]
    assert {layer.sizes for layer in sq.hf.swap(model, "full").layers} == {(4, 4, 12)}
    have = model(input_ids=ids, attention_mask=mask).last_hidden_state[mask.bool()]
    torch.testing.assert_close(have, want, atol=1e-5, rtol=1e-5)
    sq.hf.swap(model, "performer:features=16")
    assert model(input_ids=ids, attention_mask=mask).last_hidden_state.isfinite().all()


@pytest.mark.parametrize("method", ["full", "i-clustered:clusters=4,topk=3", "sinkhorn:block=4", "lsh:buckets=2"])
def test_padded_queries_are_computed_as_transformers_does(method):
    """No more of them than clusters are exact under every method."""
    case = build("bert")
    layer = sq.hf.find_layers(case.model)[1].module
    rows = []
    layer.register_forward_hook(lambda _, __, out: rows.append(out[0]))
    case.output()
    sq.hf.swap(case.model, {1: method})
    case.output()
    own, ours = rows
    torch.testing.assert_close(ours[-1][~case.valid[-1]], own[-1][~case.valid[-1]], atol=1e-5, rtol=1e-5)
    assert method == "full" or not torch.allclose(ours[-1][case.valid[-1]], own[-1][case.valid[-1]], atol=1e-4)


def test_padded_queries_behind_a_causal_prompt_are_computed_and_leak_nothing():
    model = build("llama").model
    ids, mask = padded_ids(side="right")
    sq.hf.swap(model, "local:window=2")
    layer = sq.hf.find_layers(model)[0].module
    rows = []
    layer.register_forward_hook(lambda _, __, out: rows.append(out[0]))
    model(input_ids=ids, attention_mask=mask)
    assert (rows[0][-1][~mask[-1].bool()].abs().amax(-1) > 0).all()
    model(input_ids=ids[-1:, : int(mask[-1].sum())])
    torch.testing.assert_close(rows[0][-1][mask[-1].bool()], rows[1][0], atol=1e-6, rtol=1e-5)


def test_what_a_trial_found_is_kept_until_the_config_changes():
    model = build("bert").model
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    sq.hf.describe(model)
    tried = len(calls)
    assert tried > 0
    sq.hf.swap(model, "full")
    sq.hf.describe(model)
    assert len(calls) == tried
    model.config.max_position_embeddings = 63
    sq.hf.describe(model)
    assert len(calls) > tried


def test_a_trial_leaves_no_trace():
    model = build("bert").model.train()
    model.encoder.layer[0].eval()
    modes = [module.training for module in model.modules()]
    torch.manual_seed(5)
    want = torch.rand(1)
    torch.manual_seed(5)
    verbosity = hf.logging.get_verbosity()
    sq.hf.describe(model)
    assert torch.equal(torch.rand(1), want)
    assert [module.training for module in model.modules()] == modes
    assert hf.logging.get_verbosity() == verbosity
    assert model.config._attn_implementation == "eager"


def test_inputs_of_the_user_serve_a_model_that_subquad_has_none_for():
    class Odd(Model):
        main_input_name = "odd"

        def forward(self, odd):
            x = self.embeddings(odd[..., 0])
            return (self.attention(x, None),)

    model = small(Odd)
    with pytest.raises(ValueError, match="no rule makes 'odd'"):
        sq.hf.swap(model, "full")
    batch = {"odd": torch.randint(5, 60, (2, 6, 1))}
    want = model(**batch)[0]
    sq.hf.swap(model, "full", inputs=batch)
    torch.testing.assert_close(model(**batch)[0], want)
    assert sq.hf.describe(model).methods.keys() == {0}


def test_a_copy_of_a_swapped_model_is_tried_on_its_own_attention():
    case = build("bert")
    sq.hf.swap(case.model, "clustered:clusters=3")
    copied = copy.deepcopy(case.model)
    assert [str(m) for m in sq.hf.describe(copied).methods.values()] == ["clustered:clusters=3"] * 2


def test_a_model_without_weights_is_refused():
    with torch.device("meta"):
        model = hf.BertModel(hf.BertConfig(**TEXT))
    with pytest.raises(ValueError, match="on the meta device; load its weights"):
        sq.hf.swap(model, "full")
