"""The lines of Python that a comparison prints are run."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from typer.testing import CliRunner

import subquad as sq
from subquad.tools.cli.main import app
from subquad.tools.compare import recommend
from subquad.tools.compare.code import code_of
from subquad.tools.compare.schema import Attachment, MethodReport
from subquad.tools.models import demo

TAIL = "clustered-tail:clusters=8,topk=16"


def run(code: str) -> dict[str, Any]:
    made: dict[str, Any] = {}
    exec(code, made)
    return made


def row(method: str, layers: list[int], **more: Any) -> Any:
    settings = {"name": re.split("[:@ ]", method)[0]}
    return MethodReport(**{"method": method, "settings": settings, "status": "measured", "layers": layers, **more})


def code(steps: dict[str, str], rows: list[Any], location: str | None = None, layers: int = 6, **more: Any) -> str:
    attached = Attachment(**{"dtype": "fp32", "steps": steps, "lengths": [512, 600], **more})
    model = {"kind": "embedding", "position_limit": 512, "layers": list(range(layers))}
    return code_of(attached, rows, model, location)


@pytest.mark.parametrize("name", [None, demo.ENCODER])
def test_the_demo_encoder_in_bf16_with_a_method_by_length(name):
    rows = [row("full in bf16", [*range(6)]), row(f"{TAIL} in bf16", [*range(6)])]
    made = run(code({"0": "full in bf16", "550": f"{TAIL} in bf16"}, rows, name, dtype="bf16"))
    model = made["model"]
    assert model.dtype == torch.bfloat16
    assert set(sq.hf.describe(model).methods.values()) == {sq.ByLength({0: "full", 550: TAIL})}
    inputs = made["tokenizer"]("attention " * 700, truncation=True, return_tensors="pt")
    assert inputs["input_ids"].shape[1] == 600
    with torch.inference_mode():
        assert model(**inputs).last_hidden_state.isfinite().all()


def test_exact_attention_in_bf16_needs_no_more_than_the_dtype():
    text = code({"0": "full in bf16"}, [row("full in bf16", [*range(6)])], dtype="bf16", lengths=[512])
    assert "subquad as sq" not in text
    assert run(text)["model"].dtype == torch.bfloat16


def test_a_method_in_some_of_the_layers():
    model = run(code({"0": TAIL}, [row(TAIL, [1, 3])], lengths=[512]))["model"]
    assert {n: str(method) for n, method in sq.hf.describe(model).methods.items()} == {
        n: TAIL if n in (1, 3) else "full" for n in range(6)
    }


def test_learned_parameters_of_one_length_come_from_what_is_saved():
    rows = [row("full", [*range(6)]), row("lha@mine", [*range(6)], adapter="mine")]
    assert 'sq.hf.load_adapter(model, "mine")' in code({"0": "lha@mine"}, rows)
    assert 'AutoModel.from_pretrained("served")' in code({"0": "full", "600": "lha@mine"}, rows)
    planned = replace(row("full", [0], plan="folder"), method="plan:x")
    assert 'sq.hf.swap(model, sq.load_plan("folder"))' in code({"0": "plan:x"}, [planned])


def test_a_sentence_transformer_is_loaded_as_one():
    attached = Attachment(dtype="bf16", steps={"0": f"{TAIL} in bf16"}, lengths=[600])
    facts = {
        "kind": "embedding", "library": "sentence-transformers", "position_limit": 512, "layers": list(range(6))
    }  # fmt: skip
    text = code_of(attached, [row(f"{TAIL} in bf16", [*range(6)])], facts, None)
    assert "AutoModel" not in text
    model = run(text)["model"]
    assert type(model).__name__ == "SentenceTransformer"
    assert {str(method) for method in sq.hf.describe(model).methods.values()} == {TAIL}
    assert sq.hf.transformers_model(model).dtype == torch.bfloat16
    assert torch.as_tensor(model.encode("attention " * 550)).isfinite().all()
    apart = code_of(replace(attached, steps={"0": "full", "600": "lha@mine"}),
                    [row("full", [*range(6)]), row("lha@mine", [*range(6)], adapter="mine")], facts, None)  # fmt: skip
    assert 'SentenceTransformer("served")' in apart


@pytest.mark.usefixtures("short", "undisturbed")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_causal_language_model(model, text, tmp_path, monkeypatch, dtype):
    """The class with the head, in the dtype that is recommended."""
    method = "clustered-tail:block=16,last=4"
    suffix = "" if dtype == "fp32" else f" in {dtype}"
    fast = (f"{method}{suffix}", "96")
    monkeypatch.setattr(recommend, "is_faster", lambda method, length: (method.method, length) == fast)
    given = ("--text", text, "--methods", method, "--max-kl", "50", "--dtype", dtype, "--out", tmp_path / "out")
    result = CliRunner().invoke(app, ["compare", model("llama"), *map(str, given)])
    assert result.exit_code == 0, result.output
    advice = json.loads((tmp_path / "out" / "report.json").read_text())["recommendation"]
    assert advice["attachment"]["steps"] == {"0": f"{method}{suffix}"}
    made = run(advice["code"])
    assert isinstance(made["model"], transformers.LlamaForCausalLM)
    assert made["model"].dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    assert set(map(str, sq.hf.describe(made["model"]).methods.values())) == {method}
    prompt = made["tokenizer"]("attention key value " * 30, return_tensors="pt", return_token_type_ids=False)
    assert made["model"].generate(**prompt, max_new_tokens=2).shape[1] == prompt["input_ids"].shape[1] + 2
