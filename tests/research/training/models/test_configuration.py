"""Configs: what no model can be made of is refused, and a config is the same after a trip to the disk."""

import pytest
from transformers import AutoConfig

import subquad as sq
from subquad.research.training.models import EncoderClassifier, EncoderConfig
from tests.research.training.models.build import build, symbols


@pytest.mark.parametrize(("options", "message"), [
    ({"positions": "absolute"}, "positions='absolute', but it must be one of learned, sinusoidal"),
    ({"hidden_size": 30}, "hidden_size=30 does not divide into num_attention_heads=4"),
    ({"num_key_value_heads": 3}, "num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
    ({"hidden_size": 12}, "positions='rotary' need heads of even width, but theirs is 3"),
    ({"pooling": "last"}, "pooling='last', but it must be 'mean' or 'first'"),
    ({"hidden_size": "wide"}, "hidden_size"),
])  # fmt: skip
def test_what_is_refused(options, message):
    with pytest.raises(Exception, match=message):
        EncoderConfig(**options)


@pytest.mark.parametrize("method", ["lha:buckets=4", ["full", "i-clustered:clusters=3"]])
def test_a_config_comes_back_from_the_disk(method, tmp_path):
    config = EncoderConfig(method=method, num_labels=5, positions="learned", num_key_value_heads=2, pairs=True)
    config.save_pretrained(tmp_path)
    for back in (EncoderConfig.from_pretrained(tmp_path), AutoConfig.from_pretrained(tmp_path)):
        assert isinstance(back, EncoderConfig)
        kept = ("method", "num_labels", "positions", "num_key_value_heads", "pairs", "hidden_size")
        assert all(getattr(back, name) == getattr(config, name) for name in kept)


def test_models_of_one_config_are_independent():
    config = build(method="i-clustered:clusters=3").config
    first, second = EncoderClassifier(config).eval(), EncoderClassifier(config).eval()
    wanted = second(symbols()).logits
    sq.hf.swap(first, "local:window=2")
    sq.hf.restore(first)
    assert {str(m) for m in sq.hf.describe(second).methods.values()} == {"i-clustered:clusters=3"}
    assert (second(symbols()).logits == wanted).all()
    sq.hf.restore(second)
    assert second(symbols()).logits.isfinite().all()
    fresh = EncoderConfig(method="full")
    EncoderClassifier(fresh)
    assert not hasattr(fresh, "subquad")
