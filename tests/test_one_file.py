"""What is to be one file is one: a method and its page are added to a copy of the project, and nothing else is touched."""

import json
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

## Traits

<!-- traits:begin -->
<!-- traits:end -->
"""
METHOD = """
import json, sys, torch
from typer.testing import CliRunner
import subquad as sq
from subquad.cli import app
from tests.oracle import naive, qkv

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
    """What a process says that imports the copy."""
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


def test_a_method_is_its_file_and_its_page(with_a_method):
    root = with_a_method
    before = files(root)
    assert "done" in python(root, "-c", METHOD, str(root))
    python(root, "docs/tables.py")
    after = files(root)
    assert before.keys() == after.keys()
    assert {name for name in before if before[name] != after[name]} == {
        "README.md",
        "docs/index.md",
        "docs/methods/sigmoid.md",
    }  # of which the tables are generated
    assert "| [`sigmoid`](docs/methods/sigmoid.md) |" in after["README.md"].decode()
    assert "| causal | yes |" in after["docs/methods/sigmoid.md"].decode()
    nav = (
        "import json, yaml, pathlib, nav; docs = pathlib.Path('docs'); config = pathlib.Path('mkdocs.yml').read_text()"
    )
    nav += "; print(json.dumps(nav.expanded(yaml.safe_load(config)['nav'], docs)))"
    pages = json.loads(python(root / "docs" / "..", "-c", f"import sys; sys.path.insert(0, 'docs'); {nav}"))
    assert {"sigmoid": "methods/sigmoid.md"} in next(part["Methods"] for part in pages if "Methods" in part)


@pytest.mark.long
def test_the_contract_and_the_tests_of_pages_run_for_a_new_method(with_a_method):
    words = ["-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-k", "[sigmoid or sigmoid.md"]
    said = python(with_a_method, *words, "tests/test_contract.py", "tests/test_nonfinite.py", "tests/test_docs.py")
    assert int(re.search(r"(\d+) passed", said)[1]) > 80
