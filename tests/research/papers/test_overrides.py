"""Settings of a scale that the user changes."""

import shlex
from itertools import pairwise
from pathlib import Path

import pytest

from subquad.core.errors import InputError
from subquad.research.papers.catalogue import NAMES, load
from subquad.research.papers.experiments.pretrained_approximation import PretrainedApproximationScale
from subquad.research.papers.overrides import as_options, changed, read_changes
from subquad.research.papers.run import reproduce


def test_values_are_read_as_toml_or_as_they_stand_and_one_text_is_a_tuple_of_its_own():
    given = ["model=some/hub-id", "tasks=labelled", "examples=[50]", "length=128", "seeds=[0, 1]"]
    own = changed(PretrainedApproximationScale(), read_changes(given))
    assert own == PretrainedApproximationScale(
        model="some/hub-id", tasks=("labelled",), examples=(50,), length=128, seeds=(0, 1)
    )


def test_the_command_line_that_is_said_can_be_given_again():
    changes = {"model": "some/hub-id", "k": [8, 16], "training": {"batch": 16, "precision": "bf16"}, "epochs": 0.5}
    words = as_options(changes)
    assert words[::2] == ["--set"] * 4
    assert read_changes(words[1::2]) == changes


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("model", r"write setting=value"),
        ("modle=x", r"scale has no setting 'modle'; did you mean 'model'\?"),
        ("length=short", r"scale\.length='short'"),
        ("seeds=[0.5]", r"scale\.seeds=0\.5"),
    ],
)
def test_what_does_not_fit_is_named(given, message):
    with pytest.raises(InputError, match=message):
        changed(PretrainedApproximationScale(), read_changes([given]))


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("lra", "methods={LHA='lha',other='linear'}", "scale: methods has no 'Transformer', which"),
        ("lra", "tasks={speech={}}", "scale: tasks: no task 'speech' in the paper's table; there are listops, text,"),
        ("approximation-matrix", "columns=clustered-100", "scale: columns has no 'full', whose"),
        ("approximation-matrix", "columns=['full','clustered-25']", "scale: columns: no column 'clustered-25' in"),
        ("lm-ablation", "rows=['local','(d) MLP half']", r"no row '\(d\) MLP half'; did you mean '\(d\) MLP, half'"),
        ("lm-ablation", "rows=[]", "rows must name at least one"),
        ("training-dynamics", "seeds=[0,0]", "name 2 cells 'membership=balanced_seed=0'; give each of them once"),
    ],
)
def test_what_a_report_cannot_be_made_of_is_refused_before_anything_runs(name, given, message, tmp_path):
    with pytest.raises(InputError, match=message):
        reproduce(load(name), "smoke", tmp_path / "out", changes=read_changes([given]))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "scale", "given", "folders"),
    [
        ("lm-ablation", "small", [], ["wikitext-2"]),
        ("lm-ablation", "paper", [], ["wikitext-103"]),
        ("training-dynamics", "paper", [], ["wikitext-103"]),
        ("lra", "small", [], ["movie_reviews", "fashion_mnist"]),
        ("lra", "paper", [], ["movie_reviews", "state_union", "fashion_mnist"]),
        ("lra", "small", ["tasks={text={task={files=['mine.csv']}}}"], []),
        ("spectrum", "small", [], ["wikitext-2", "movie_reviews"]),
        ("spectrum", "paper", ["texts=wikitext-103/test.txt"], ["wikitext-103"]),
        ("performer-approximation", "small", ["text=mine/a.txt"], ["mine"]),
        ("attention-utility", "small", ["read=mine/a.txt", "fit=other/b.txt"], ["mine", "other"]),
        ("bucket-imbalance", "small", ["read=mine/a.txt", "fit=mine/b.txt"], ["mine"]),
    ],
)
def test_an_experiment_needs_what_its_settings_read(name, scale, given, folders):
    experiment = load(name)
    assert list(experiment.needs(changed(experiment.scales[scale], read_changes(given)))) == folders


def test_the_commands_of_the_page_need_what_it_says_is_in_the_folder():
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "reproduce.md").read_text("utf-8")
    commands = [shlex.split(line) for line in page.splitlines() if line.endswith("--data-dir mine")]
    assert len(commands) == 2
    for _, _, name, *words in commands:
        changes = read_changes([word for option, word in pairwise(words) if option == "--set"])
        for part in load(name).needs(changed(load(name).scales["small"], changes)):
            assert f"`{part}" in page


@pytest.mark.parametrize("name", NAMES)
def test_settings_of_every_experiment_can_be_read_back(name):
    for settings in load(name).scales.values():
        field = next(iter(settings.__dataclass_fields__))
        assert changed(settings, {field: getattr(settings, field)}) == settings


def test_a_run_with_changed_settings_says_so(tmp_path):
    changes = {"sequences": 2, "heads": 1}
    header, _, cells = reproduce(load("bucket-imbalance"), "smoke", tmp_path, changes=changes)
    assert header.command == "subquad reproduce bucket-imbalance --scale smoke --set sequences=2 --set heads=1"
    assert (header.settings["sequences"], header.settings["heads"]) == (2, 1)
    assert "sequence 1" in cells
    with pytest.raises(InputError, match="contains another run"):
        reproduce(load("bucket-imbalance"), "smoke", tmp_path)
