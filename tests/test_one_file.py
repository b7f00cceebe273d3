"""Check that one file is enough: a method with its page, and a backend, are added to a copy and nothing is touched."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COPIED = ("src", "docs", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "mkdocs.yml", "pyproject.toml", "tests")
PAGE = """# sigmoid

Normalised sigmoid attention. Class: `sq.Sigmoid`.

## When to use it

As an example.

```python
import torch
import subquad as sq

out = sq.attention(*torch.randn(3, 2, 4, 10, 8), method="sigmoid")
```
"""
METHOD = """
import json, sys, torch
from typer.testing import CliRunner
import subquad as sq
from subquad.tools.cli.main import app
from subquad.testing.oracle import naive, qkv

assert sq.__file__.startswith(sys.argv[1]), sq.__file__
assert "sigmoid" in sq.list_methods()
method = sq.parse_method("sigmoid")
assert method == sq.Sigmoid() == sq.from_dict({"name": "sigmoid"}) and str(method) == "sigmoid"
q, k, v = qkv(10, E=8)
want = sq.attention(q, k, v, method="sigmoid", mask=sq.Mask.causal())
assert torch.equal(method.bind(heads=2, head_dim=8)(q, k, v, is_causal=True), want)
weights = (q @ k.mT * 8**-0.5).sigmoid().tril()
torch.testing.assert_close(want, weights / weights.sum(-1, keepdim=True) @ v)
assert sq.nn.MultiheadAttention(16, 2, method="sigmoid")(torch.zeros(1, 5, 16)).shape == (1, 5, 16)
listed = CliRunner().invoke(app, ["methods", "--json"])
assert listed.exit_code == 0 and "sigmoid" in json.loads(listed.stdout)
assert CliRunner().invoke(app, ["methods", "sigmoid"]).exit_code == 0
print("done")
"""


TOY = '''"""Causal products by a matrix of the tokens, for 40 of them at most."""

from typing import Any

import torch
from torch import Tensor

from subquad.kernels import dispatch
from subquad.kernels.attention.products.op import causal_product, directed_product

dispatch.register("toy", lambda: None)
dispatch.register("later", lambda: "it has no machine yet")
calls: list[int] = []


@causal_product.refusal("toy")
def refusal(x: Any) -> str | None:
    """Why it cannot take this call."""
    tokens = x.query.shape[2]
    return f"{tokens} tokens, and it takes at most 40" if tokens > 40 else None


@directed_product.on("toy")
def compute(out: Tensor, x: Any) -> None:
    """The products with the tokens before, or behind, in one matrix."""
    query, key, value, reverse = x
    calls.append(query.shape[2])
    heads = max(len(x[0]) for x in (query, key, value))
    query, key, value = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (query, key, value))
    products = (query @ key.mT).triu() if reverse else (query @ key.mT).tril()
    out.copy_((products @ value).unflatten(1, (out.shape[1], -1)).sum(2))
'''
BACKEND = """
import sys, torch
import subquad as sq
from subquad.kernels.attention.products import toy
from subquad.testing.oracle import gradients, qkv, tracked

assert sq.__file__.startswith(sys.argv[1]), sq.__file__
assert sq.backends()["toy"] == "available"
assert sq.backends()["later"] == "it has no machine yet"

def results(backend, tokens=30):
    inputs = tracked(*qkv(tokens, H=4, G=2))
    with sq.use_backend(backend):
        out = toy.causal_product(*inputs)
    return [out, *gradients(out, *inputs)]

for mine, wanted in zip(results("toy"), results("reference"), strict=True):
    torch.testing.assert_close(mine, wanted, atol=1e-4, rtol=1e-4)
assert toy.calls == [30] * 4, toy.calls  # forward, and the gradients of query, key and value
toy.causal_product(*qkv(30))  # of the backends that take a call, the one that was registered last
assert len(toy.calls) == 5
toy.causal_product(*qkv(50))
assert len(toy.calls) == 5
for backend, tokens, says in (
    ("toy", 50, "backend 'toy' cannot run this call: 50 tokens, and it takes at most 40"),
    ("later", 30, "backend 'later' cannot run here: it has no machine yet"),
):
    try:
        results(backend, tokens)
    except ValueError as refusal:
        assert says in str(refusal), refusal
    else:
        raise AssertionError(says)
print("done")
"""
NAVIGATION = """
import json, sys, yaml
from pathlib import Path
sys.path.insert(0, "docs")
import nav
print(json.dumps(nav.expanded(yaml.safe_load(Path("mkdocs.yml").read_text())["nav"], Path("docs"))))
"""


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def copied(tmp_path_factory) -> Path:
    """The project in a folder of its own."""
    root = tmp_path_factory.mktemp("copy")
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, root)
    return root


def python(root: Path, *words: str) -> str:
    """The output of a process that imports the copy."""
    environment = os.environ | {"PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}"}
    done = subprocess.run([sys.executable, *words], cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def with_a_method(copied) -> Path:
    """The copy with the method of docs/how-to/add-a-method.md, its page, and nothing else."""
    code = re.search(r"```python\n(.*?)```", (ROOT / "docs/how-to/add-a-method.md").read_text("utf-8"), re.DOTALL)[1]
    (copied / "src/subquad/methods/sigmoid.py").write_text(code, "utf-8")
    (copied / "docs/methods/sigmoid.md").write_text(PAGE, "utf-8")
    return copied


@pytest.mark.slow
def test_a_method_is_its_file_and_its_page(with_a_method):
    root = with_a_method
    before = files(root)
    assert "done" in python(root, "-c", METHOD, str(root))
    python(root, "docs/tables.py")
    after = files(root)
    assert before.keys() == after.keys()
    assert {name for name in before if before[name] != after[name]} == {
        "docs/methods.md",
        "docs/reference/methods.md",
    }  # of which the tables are generated
    assert (
        "| [`sigmoid`](methods/sigmoid.md) | exact | As an example. | yes | no | yes |"
        in after["docs/methods.md"].decode()
    )
    assert '{"sigmoid": "methods/sigmoid.md"}' in python(root, "-c", NAVIGATION)


@pytest.mark.long
def test_the_contract_and_the_tests_of_pages_run_for_a_new_method(with_a_method):
    words = ["-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-k", "[sigmoid or sigmoid.md"]
    said = python(
        with_a_method, *words, "tests/library/test_contract.py", "tests/library/test_nonfinite.py", "tests/test_docs.py"
    )
    assert int(re.search(r"(\d+) passed", said)[1]) > 60


@pytest.mark.slow
def test_a_backend_of_an_op_is_its_file(copied):
    path = copied / "src/subquad/kernels/attention/products/toy.py"
    path.write_text(TOY, "utf-8")
    assert "done" in python(copied, "-c", BACKEND, str(copied))
    path.unlink()
