"""The settings of a run: defaults, files, overrides, and one line for each mistake."""

import re
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest
import tomli_w

from subquad.core.errors import InputError
from subquad.core.spelling import FEW
from subquad.research.papers import catalogue as _with_their_tasks  # noqa: F401
from subquad.research.training.settings import (
    LISTED,
    ModelSettings,
    TrainingSettings,
    read_overrides,
    read_toml,
    settings_of,
)
from subquad.research.training.tasks import TASKS
from subquad.research.training.workflow import plain

ROOT = Path(__file__).parents[3]


def test_the_tasks_defaults_then_the_file_then_overrides(tmp_path: Path):
    file = tmp_path / "run.toml"
    file.write_text('task = "masked-copy"\n[model]\nlayers = 3\nwidth = 96\n[training]\nbatch = 64\n')
    found = settings_of("masked-copy", read_toml(file), read_overrides(["model.width=48", "training.seed=1"]))
    assert (found.model.heads, found.training.optimizer) == (6, "radam")  # the task's
    assert (found.model.layers, found.training.batch) == (3, 64)  # the file's
    assert (found.model.width, found.training.seed) == (48, 1)


def test_a_method_for_each_layer_from_a_file_and_from_the_command_line(tmp_path: Path):
    file = tmp_path / "run.toml"
    file.write_text('[model]\nmethod = ["full", "local:window=16"]\n')
    assert settings_of("masked-copy", read_toml(file)).model.method == ["full", "local:window=16"]
    given = read_overrides(["model.method=['full', 'lha:buckets=4']"])
    assert settings_of("masked-copy", read_toml(file), given).model.method == ["full", "lha:buckets=4"]
    assert settings_of("masked-copy", read_overrides(["model.method=linear"])).model.method == "linear"


def test_what_a_run_writes_down_gives_the_same_settings():
    found = settings_of("text", read_overrides(["task.files=mine.csv", "training.steps=2e3"]))
    assert found.training.steps == 2000
    again = settings_of("text", tomllib.loads(tomli_w.dumps(plain(found.to_dict()))))
    assert again == found


def test_the_tasks_own_warm_up_fits_into_a_shorter_run():
    assert settings_of("text").training.warmup == 60
    assert settings_of("text", read_overrides(["training.steps=61"])).training.warmup == 60
    assert settings_of("text", read_overrides(["training.steps=60"])).training.warmup == 6
    assert settings_of("text", read_overrides(["training.steps=2"])).training.warmup == 0


def test_the_schedule_plateau_has_no_warm_up():
    plateau = read_overrides(["training.schedule=plateau"])
    assert settings_of("text", plateau).training.warmup == 0
    with pytest.raises(InputError, match="schedule='plateau' has no warm-up, but warmup=60; give warmup=0"):
        settings_of("text", {"training": {"warmup": 60}}, plateau)


MISTAKES = {
    "training.step=3": r"training has no setting 'step'; did you mean 'steps'\?",
    "task.symbol=3": r"task has no setting 'symbol'; did you mean 'symbols'\?",
    "modle.layers=3": r"no table \[modle\]; did you mean 'model'\?",
    "layers=3": "write table.setting=value",
    "model.layers=2.5": r"model\.layers=2\.5: .*integer",
    "model.layers=two": r"model\.layers='two': .*integer",
    "model.layers=true": r"model\.layers=True: .*number",
    "model.layers=0": "layers=0, but it must be at least 1",
    "model.positions=rotari": r"model\.positions='rotari': .*'rotary'.*'relative'",
    "model.method=i-clusterd": "no method 'i-clusterd'; did you mean 'i-clustered'",
    "model.method=i-clustered:cluster=3": "'i-clustered' has no setting 'cluster'; did you mean 'clusters'",
    "model.method=[]": r"method=\[\] names no method",
    "model.feed_forward=-1": "feed_forward=-1, but it must be at least 0",
    "model.dropout=-0.1": r"model: dropout=-0\.1, but it must be at least 0 and less than 1",
    "model.dropout=1": r"model: dropout=1\.0, but it must be at least 0 and less than 1",
    "model.attention_dropout=1.5": r"model: attention_dropout=1\.5, but it must be at least 0 and less than 1",
    "model.method=[full]": "write a list as TOML does",
    "training.learning_rate=nan": r"training\.learning_rate=nan: .*finite",
    "training.learning_rate=0": r"learning_rate=0\.0, but it must be more than 0",
    "training.schedule=cosin": r"training\.schedule='cosin': .*'cosine'",
    "training.auxiliary=1.5": r"auxiliary=1\.5, but it must be a number from 0 to 1",
    "training.accumulate=3": "batch=32 does not divide into accumulate=3 passes",
    "training.warmup=5000": "warmup=5000 does not end before the run of steps=5000 does",
    "training.patience=3": "patience looks at validations: give every",
    "training.schedule=plateau": "schedule='plateau' looks at validations: give every",
    "task.masked=0.9": r"masked=0\.9, but",
    "task.name=text": "the settings are of the task 'text', but 'masked-copy' is to be trained",
}


@pytest.mark.parametrize(
    ("table", "kind"),
    [("task", TASKS["masked-copy"]), ("model", ModelSettings), ("training", TrainingSettings)],
)
def test_an_unknown_setting_names_the_page_that_lists_all(table: str, kind: type):
    with pytest.raises(InputError) as raised:
        settings_of("masked-copy", read_overrides([f"{table}.qqqq=3"]))
    page = re.search(r"the page (docs/\S+\.md) lists all", str(raised.value).lower())
    known = [field.name for field in fields(kind)]
    if len(known) <= FEW:
        assert all(name in str(raised.value) for name in known)
    else:
        assert page, str(raised.value)
    text = (ROOT / LISTED[table]).read_text("utf-8")
    assert all(re.search(rf"^\| .*`{name}`.* \|", text, re.MULTILINE) for name in known)


@pytest.mark.parametrize("given", MISTAKES)
def test_a_mistake_is_one_line_that_names_it(given: str):
    with pytest.raises(InputError, match=MISTAKES[given]) as raised:
        settings_of("masked-copy", read_overrides([given]))
    assert "\n" not in str(raised.value)


def test_an_unknown_task_is_told_the_nearest():
    with pytest.raises(InputError, match="no task 'masked-kopy'; did you mean 'masked-copy'"):
        settings_of("masked-kopy")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"[model\n", "is not TOML"),
        (b"\xff\xfe", "is not TOML"),
        (b"steps = 3\n", "'steps' is outside the tables"),
        (None, "no settings at"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(content: bytes | None, says: str, tmp_path: Path):
    file = tmp_path / "run.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InputError, match=says) as raised:
        read_toml(file)
    assert str(file) in str(raised.value)
