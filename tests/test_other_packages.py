"""Methods of other packages: a package is built and installed into a folder, and used with and without that folder."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import subquad
from tests.tools.workflows import tiny

ROOT = Path(__file__).parents[1]
SOURCE = Path(subquad.__file__).parents[1]
pytestmark = pytest.mark.slow  # processes and environments of their own
PACKAGE = "'sigmoid-attention' 1.2, which is not installed here: pip install sigmoid-attention"
MODULE = """
from dataclasses import dataclass, replace
import subquad as sq

@sq.register
@dataclass(frozen=True)
class Mine(sq.Full):
    '''Exact attention by another name.'''
    name = "mine"
    traits = replace(sq.Full.traits, skips_padding=False, source="a test")
"""


def example() -> str:
    """The method of docs/how-to/add-a-method.md."""
    return re.search(r"```python\n(.*?)```", (ROOT / "docs/how-to/add-a-method.md").read_text("utf-8"), re.DOTALL)[1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A folder with the package."""
    root = tmp_path_factory.mktemp("other")
    shutil.copytree(ROOT / "tests/other_package", root / "source")
    (root / "source/src/sigmoid_attention/sigmoid.py").write_text(example(), "utf-8")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--target", str(root / "site"), str(root / "source")], check=True, timeout=120)
    return root / "site"


@pytest.fixture(scope="module")
def saved(installed, tmp_path_factory) -> Path:
    """A folder with a model, an adapter and a plan that have the package's methods."""
    folder = tmp_path_factory.mktemp("saved")
    python(SAVE, folder, installed)
    return folder


def process(words: list[str], folder: Path, *sites: Path, **environment: str) -> subprocess.CompletedProcess:
    """A Python process in a folder, with these folders of packages."""
    path = os.pathsep.join(map(str, (SOURCE, *sites)))
    # The folder comes first in the path of `python -c` and of `python -m`, and not in that of the script `subquad`.
    variables = os.environ | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"} | environment
    return subprocess.run([sys.executable, *words], cwd=folder, env=variables, capture_output=True, text=True)


def python(code: str, folder: Path, *sites: Path) -> str:
    """The output of a program."""
    done = process(["-c", code], folder, *sites)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


COMMANDS = """
import json, sys
from typer.testing import CliRunner
from subquad.tools.cli.main import app
done = [CliRunner().invoke(app, line.split()) for line in sys.argv[1:]]
print(json.dumps([(result.exit_code, result.stdout, result.stderr + str(result.exception or "")) for result in done]))
"""


def commands(folder: Path, *lines: str, sites: tuple[Path, ...] = (), **environment: str) -> list[tuple[int, str, str]]:
    """The exit code, standard output and standard error of each command, run in one process after another."""
    done = process(["-c", COMMANDS, *lines], folder, *sites, **environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def outputs(folder: Path, *lines: str, sites: tuple[Path, ...] = (), **environment: str) -> list[str]:
    """The output of commands that succeed."""
    results = commands(folder, *lines, sites=sites, **environment)
    assert [code for code, _, _ in results] == [0] * len(lines), results
    return [printed for _, printed, _ in results]


# ---------------------------------------------------------------------- in Python

CALLS = """
import sys, torch
import subquad as sq
q, k, v = torch.randn(3, 1, 2, 10, 8)
sq.attention(q, k, v, method="clustered")
assert not any(name.startswith("sigmoid_attention") for name in sys.modules)
compiled = torch.compile(lambda q: sq.attention(q, k, v, method="sigmoid"), fullgraph=True, backend="eager")
try:
    compiled(q)
except Exception as error:
    assert "packages are not searched while torch.compile traces" in str(error), error
out = sq.attention(q, k, v, method="sigmoid")
torch.testing.assert_close(compiled(q), out)
assert "sigmoid_attention.sigmoid" in sys.modules
weights = (q @ k.mT * 8**-0.5).sigmoid()
torch.testing.assert_close(out, weights / weights.sum(-1, keepdim=True) @ v)
assert {"sigmoid", "tempered", "full"} <= set(sq.list_methods()) and sq.METHODS["tempered"]().start == 0
method = sq.parse_method("tempered:start=0.5")
assert sq.from_dict(method.to_dict()) == method and str(method) == "tempered:start=0.5"
assert sq.parse_method("sigmoid+keep:first=2") == sq.Sum("keep:first=2+sigmoid")
assert sq.nn.MultiheadAttention(16, 2, method="tempered")(torch.zeros(1, 5, 16)).shape == (1, 5, 16)
"""


def test_a_method_of_a_package_is_found_by_its_name_once_it_is_needed(installed, tmp_path):
    python(CALLS, tmp_path, installed)


def test_without_the_package_the_name_is_unknown(tmp_path):
    python(
        "import subquad as sq\n"
        "try:\n    sq.parse_method('sigmoid')\n"
        "except ValueError as error:\n    assert \"no method 'sigmoid'\" in str(error), error\n"
        "else:\n    raise AssertionError",
        tmp_path,
    )


@pytest.mark.long
def test_the_conformance_suite_runs_for_methods_of_a_package(installed, tmp_path):
    (tmp_path / "test_theirs.py").write_text(
        "import subquad.testing\n"
        "from sigmoid_attention.sigmoid import Sigmoid\n\n"
        "class TestSigmoid(subquad.testing.MethodContract):\n    method = Sigmoid()\n\n"
        "class TestTempered(subquad.testing.MethodContract):\n    methods = ['tempered', 'tempered:start=0.5']\n\n"
        "    def test_exact_limit_is_at_the_start(self, method):\n        assert method.start in (0.0, 0.5)\n"
    )
    done = process(["-m", "pytest", "-q", "--strict-markers", "-p", "no:cacheprovider"], tmp_path, installed)
    assert done.returncode == 0, done.stdout[-5000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 280


def test_the_conformance_suite_finds_a_broken_method_and_asks_for_one(tmp_path):
    (tmp_path / "mine.py").write_text(
        MODULE + "    def attend(self, query, key, value, call):\n        return value, None"
    )
    (tmp_path / "test_mine.py").write_text(
        "import sys; sys.path.insert(0, '.')\n"
        "import subquad.testing\nfrom mine import Mine\n\n"
        "class TestMine(subquad.testing.CallContract):\n    method = Mine()\n"
    )
    words = [
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        "test_exact_limit_equals or test_padding_changes_no_o",
    ]
    found = process(words, tmp_path)
    assert found.returncode == 1
    assert re.search(r"FAILED .*test_exact_limit_equals_naive_softmax\[mine\]", found.stdout)
    assert "3 passed" in found.stdout
    (tmp_path / "test_mine.py").write_text(
        "import subquad.testing\n\nclass TestMine(subquad.testing.CallContract): ...\n"
    )
    assert "TestMine tests no method: write `method = Mine()`" in process(words, tmp_path).stdout


# ---------------------------------------------------------------------- files

SAVE = """
import torch, transformers
import subquad as sq
torch.manual_seed(0)
config = transformers.BertConfig(
    vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48
)
model = transformers.BertModel(config).eval()
ids = torch.arange(20)[None]
methods = {0: sq.parse_method("sigmoid"), 1: sq.parse_method("sigmoid+keep:first=2")}
sq.hf.swap(model, methods)
model.save_pretrained("model")
torch.save(model(ids).last_hidden_state, "out.pt")
described = sq.hf.adapters.describe_model(model)
sq.Plan(model=described, lengths=(20,), layers=methods, verified={}).save("plan")
sq.hf.swap(model, "tempered:start=0.5")
sq.hf.save_adapter(model, "adapter")
"""
LOAD = """
import torch, transformers
import subquad as sq, subquad.hf
model = transformers.BertModel.from_pretrained("model").eval()
torch.testing.assert_close(model(torch.arange(20)[None]).last_hidden_state, torch.load("out.pt"), atol=0, rtol=0)
assert sq.load_plan("plan").layers[1] == sq.parse_method("sigmoid+keep:first=2")
sq.hf.load_adapter(model, "adapter")
"""
LOAD_WITHOUT = """
import json, warnings, transformers
import subquad as sq, subquad.hf
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    model = transformers.BertModel.from_pretrained("model")
messages = [str(w.message) for w in warned if "attention swapped" in str(w.message)]
for load in (lambda: sq.hf.reattach(model), lambda: sq.load_plan("plan"), lambda: sq.hf.load_adapter(model, "adapter")):
    try:
        load()
    except ValueError as error:
        messages.append(str(error))
print(json.dumps(messages))
"""


def test_saved_models_adapters_and_plans_load_with_the_package(saved, installed):
    python(LOAD, saved, installed)


def test_without_the_package_loading_names_it(saved):
    messages = json.loads(python(LOAD_WITHOUT, saved))
    assert len(messages) == 4
    for message, name in zip(messages, ("sigmoid", "sigmoid", "sigmoid", "tempered"), strict=True):
        assert f"the method {name!r} is from the package {PACKAGE}" in message
        assert "damaged" not in message


def test_what_is_recorded_of_the_methods_of_subquad_alone_is_as_before(saved):
    config = json.loads((saved / "model/config.json").read_text())["subquad"]["methods"]
    source = {"module": "sigmoid_attention.sigmoid", "package": "sigmoid-attention", "version": "1.2"}
    assert config["0"] == {"name": "sigmoid", "provided-by": {"sigmoid": source}}
    assert config["1"]["provided-by"] == {"sigmoid": source}
    python(
        "import subquad as sq\nfrom subquad.methods.core.plugins import record_of\n"
        "for cls in sq.METHODS.values():\n    assert record_of(cls()) == cls().to_dict()",
        saved,
    )


def test_another_version_of_the_package_is_named(saved, tmp_path):
    declare(tmp_path, "sigmoid-attention", "2.0", "")
    messages = json.loads(python(LOAD_WITHOUT, saved, tmp_path))
    assert all(
        "but version 2.0, the one that is installed here, does not declare it" in message for message in messages
    )


# ---------------------------------------------------------------------- commands


BENCH = "bench --lengths 64 --quick --out bench --methods"


def test_commands_take_methods_of_a_package(installed, tmp_path):
    lines = ["methods --json", "methods sigmoid", f"{BENCH} sigmoid"]
    listed, described, measured = outputs(tmp_path, *lines, sites=(installed,))
    assert {"sigmoid", "tempered", "full"} <= set(json.loads(listed))
    assert "an example" in described
    assert "sigmoid" in measured
    assert "sigmoid" in outputs(tmp_path, "report bench")[0]  # where the package is not installed


def test_compare_takes_methods_of_a_package(installed, tmp_path):
    tiny.save("bert", tmp_path / "model")
    (tmp_path / "text.txt").write_text("\n\n".join(tiny.documents()))
    line = "compare model --text text.txt --methods sigmoid --max-length 32 --out compared"
    printed = outputs(tmp_path, line, sites=(installed,))[0]
    assert "sigmoid" in printed
    assert "sigmoid" in outputs(tmp_path, "report compared")[0]  # where the package is not installed


def test_import_registers_the_methods_of_a_module(tmp_path):
    (tmp_path / "mine.py").write_text(MODULE)
    lines = [f"{BENCH} mine", f"{BENCH} mine --import mine --executor processes --workers 1", "methods mine"]
    (code, _, said), measured, described = commands(tmp_path, *lines)
    assert code == 2
    assert "no method 'mine'" in said
    assert measured[0] == described[0] == 0, measured
    assert "--import mine" in (tmp_path / "bench/bench.md").read_text()
    assert "a test" in outputs(tmp_path, "methods mine", sites=(tmp_path,), SUBQUAD_IMPORT="mine")[0]


def test_import_of_a_missing_module_is_one_line(tmp_path):
    ((code, _, said),) = commands(tmp_path, "methods --import nothing")
    assert code == 2
    assert "the module 'nothing' of --import (SUBQUAD_IMPORT) cannot be imported: ModuleNotFoundError" in said


# ---------------------------------------------------------------------- packages that are broken


def declare(site: Path, package: str, version: str, entries: str) -> None:
    """Make a folder in which a package is installed that declares methods."""
    record = site / f"{package.replace('-', '_')}-{version}.dist-info"
    record.mkdir()
    (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    (record / "entry_points.txt").write_text(f"[subquad.methods]\n{entries}\n")


BROKEN = {  # entry points by their names, and what is said of them
    "absent": ("absent:Theirs", "loading absent:Theirs failed: ModuleNotFoundError"),
    "no-class": ("mine:Absent", "loading mine:Absent failed: AttributeError"),
    "renamed": ("mine:Mine", "the name of mine:Mine is 'mine': the two must be equal"),
    "no-method": ("mine:dataclass", "is not a dataclass derived from sq.Method"),
    "full": ("other:Mine", "other.Mine is called 'full', but so is subquad.methods.full.Full; rename one of them"),
}


def test_errors_in_a_package_name_it(tmp_path):
    (tmp_path / "mine.py").write_text(MODULE)
    (tmp_path / "other.py").write_text(MODULE.replace('"mine"', '"full"').replace("@sq.register", ""))
    declare(tmp_path, "their-package", "3.1", "\n".join(f"{name} = {value}" for name, (value, _) in BROKEN.items()))
    names = [name for name in BROKEN if name != "full"]  # which is not looked for in packages
    lines = [*(f"methods {name}" for name in names), "methods --json"]
    *refused, (code, listed, warned) = commands(tmp_path, *lines, sites=(tmp_path,))
    for name, (refusal, _, said) in zip(names, refused, strict=True):
        assert refusal == 2
        assert f"the package their-package 3.1 declares {name!r} in the entry points 'subquad.methods', but" in said
        assert BROKEN[name][1] in said
    assert code == 0  # the other methods are listed
    assert json.loads(listed)["full"]["source"] != "a test"
    for _, reason in BROKEN.values():
        assert reason in warned
