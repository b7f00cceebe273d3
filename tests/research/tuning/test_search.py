"""The option `--search`: what it reads, and what it refuses in one line."""

import pytest

from subquad.core.errors import InputError
from subquad.research.papers import catalogue as _with_their_tasks  # noqa: F401
from subquad.research.tuning.search import Base, all_points, read_searches

BASE = Base("masked-copy", ({"model": {"method": "clustered:bits=31"}},))


def read(*texts, base=BASE):
    return read_searches(texts, base)


def test_a_logarithmic_range():
    (one,) = read("training.learning_rate=1e-4:1e-2:log")
    assert (one.low, one.high, one.log, one.whole, one.choices) == (1e-4, 1e-2, True, False, ())
    assert one.shown(0.0012345678) == "0.00123457"


@pytest.mark.parametrize(
    ("text", "points"),
    [
        ("training.batch=8:32:8", [8, 16, 24, 32]),
        ("model.layers=1:3", [1, 2, 3]),
        ("method.clusters=16,32,16", ["16", "32"]),
        ("method=full,clustered", ["full", "clustered"]),
        ("model.method=['full', 'i-clustered:clusters=25,topk=16']", ["full", "i-clustered:clusters=25,topk=16"]),
        ("training.clip=0:1", None),  # whole ends, but the setting is not a whole number
    ],
)
def test_points(text, points):
    (one,) = read(text, base=Base("masked-copy") if "method=" in text else BASE)
    assert one.points == points


def test_all_points_are_those_of_all_settings_together():
    found = read("model.layers=1:2", "method.clusters=4,8")
    points = all_points(found, 4)
    assert [tuple(point.values()) for point in points] == [(1, "4"), (1, "8"), (2, "4"), (2, "8")]
    assert all_points(found, 3) is None
    assert all_points(read("model.dropout=0:0.5"), 100) is None


def test_values_come_into_the_settings():
    values = {"training.learning_rate": "0.01", "method.clusters": "32"}
    settings = BASE.at(values)
    assert settings.training.learning_rate == 0.01
    assert settings.model.method == "clustered:clusters=32,bits=31"
    assert BASE.at({"method": "i-clustered", "method.clusters": "7"}).model.method == "i-clustered:clusters=7"


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ((), "nothing to search: give --search training.learning_rate=1e-4:1e-2:log"),
        (("lr=1:2",), "--search 'lr=1:2': write table.setting=values, as in --search"),
        (("training.learning_rate",), "--search 'training.learning_rate': write table.setting=values"),
        (("trainings.batch=8,16",), "--search trainings.batch=8,16: no table 'trainings'; did you mean 'training'"),
        (("training.bach=8,16",), "training has no setting 'bach'; did you mean 'batch'"),
        (("method.cluster=8,16",), "'clustered' has no setting 'cluster'"),
        (("training.batch=32:8",), "--search training.batch=32:8: the range from 32 to 8 is upside down"),
        (("training.clip=2:2",), "--search training.clip=2:2: the range from 2 to 2 is upside down or empty"),
        (("training.learning_rate=0:1:log",), ".*: a logarithmic range begins above 0, not at 0"),
        (("training.batch=8:32:64",), "--search training.batch=8:32:64: '64' is neither log nor a step of at most 24"),
        (("training.batch=8:32:often",), "--search training.batch=8:32:often: 'often' is neither log nor a step"),
        (("training.batch=8.5:32",), "training.batch='?8.5"),
        (("training.batch=8:32.5",), "--search training.batch=8:32.5: training.batch is a whole number"),
        (("model.positions=1:2",), "model.positions"),
        (("training.batch=8",), "--search training.batch=8: '8' is one value, which leaves nothing to search; a range"),
        (("training.batch=8,eight",), "training.batch='eight'"),
        (("training.learning_rate=-1:1",), "training: learning_rate=-1.0, but it must be more than 0|training"),
        (("method=['full'",), r"--search method=\['full': write a list as TOML does"),
        (("model.layers=1:2", "model.layers=3:4"), "--search model.layers=3:4: model.layers is searched twice"),
        (("method=full,lsh",), "method is searched by --search method=full,lsh, and given as 'clustered:bits=31' too"),
    ],
)
def test_what_is_refused(texts, message):
    with pytest.raises(InputError, match=f"^{message}"):
        read(*texts)


def test_every_method_must_have_the_settings_that_are_searched():
    with pytest.raises(InputError, match=r"^'full' has no setting 'clusters'"):
        read("method=clustered,full", "method.clusters=4,8", base=Base("masked-copy"))


def test_the_setting_of_a_method_that_is_not_named():
    with pytest.raises(InputError, match=r"^--search method\.clusters=4, and no --method is given: 'full' has no sett"):
        read("method.clusters=4,8", base=Base("masked-copy"))


def test_what_is_given_is_not_searched():
    base = Base("masked-copy", ({"training": {"batch": 8}},))
    with pytest.raises(InputError, match=r"^training.batch is searched by --search training.batch=8,16, and given as"):
        read("training.batch=8,16", base=base)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("local:window=4+keep:first", "--search method.clusters=4 is of one method, but the method is the sum"),
        (["full", "full"], "--search method.… is of one method, but the layers have 2 of their own"),
    ],
)
def test_a_setting_of_a_method_needs_one_method(method, message):
    base = Base("masked-copy", ({"model": {"method": method, "layers": 2}},))
    with pytest.raises(InputError, match=f"^{message}"):
        read("method.clusters=4,8", base=base)
