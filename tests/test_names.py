"""Every name in backquotes in a docstring exists, and so does every argument and attribute that one documents."""

import pytest

from tests.identifiers import SOURCE, python_files
from tests.names import library, names_in, read, stale_names

FILE = '''"""A file. {text}"""

from torch import nn
from subquad.masks import Mask


def function(argument, *others):
    """A function.

    Args:
        {entry}: what it is.
    """
    local = Mask.causal()
    return local
'''


@pytest.fixture(scope="module", autouse=True)
def let_go():
    """Ends without millions of nodes of syntax trees, which the search for garbage would go through from then on."""
    yield
    for made in (library, read):
        made.cache_clear()


@pytest.fixture
def found(tmp_path):
    """The findings in a file with this text in backquotes and this documented argument, without the file's name."""

    def find(text, entry="argument"):
        path = tmp_path / f"file{len(list(tmp_path.iterdir()))}.py"
        path.write_text(FILE.format(text=f"`{text}`" if text else "", entry=entry), "utf-8")
        return [line.removeprefix(f"{path.name}:") for line in stale_names([path], library())]

    return find


def test_names_in_docstrings_exist():
    wrong = list(stale_names(python_files([SOURCE]), library()))
    assert not wrong, "\n".join(["names in docstrings that do not exist:", *wrong])


# ---------------------------------------------------------------------- the checks themselves


@pytest.mark.parametrize(
    "name",
    [
        "does_not_exist",
        "Mask.does_not_exist",
        "sq.Mask.does_not_exist",
        "sq.does_not_exist",
        "masks.mask.does_not_exist",
        "does_not_exist.causal",
        "kernels.choose.clusters",
        "does-not-exist",
        "masks/does_not_exist",
        "does_not_exist.py",
        "keeps_rest",
        "ops.choose.clusters",
    ],
)
def test_a_wrong_name_is_found(found, name):
    assert found(name) == [f"1: {name}"]


@pytest.mark.parametrize(
    "text",
    [
        "does_not_exist()",
        "does_not_exist[0]",
        "Mask.causal(does_not_exist=1)",
        "does_not_exist=None",
        "a + does_not_exist",
    ],
)
def test_a_wrong_name_is_found_inside_of_code(found, text):
    assert found(text) == ["1: does_not_exist"]


def test_a_documented_argument_must_exist(found):
    assert found("", "does_not_exist") == ["11: does_not_exist (documented)"]
    assert found("", "argument, does_not_exist") == ["11: does_not_exist (documented)"]
    assert found("", "argument, *others") == []


@pytest.mark.parametrize(
    "text",
    [
        # names of the code
        "function",
        "local",
        "Mask.causal",
        "sq.Mask.padding(lengths)",
        "subquad.masks.Mask",
        "masks.mask",
        "kernels.selection.clusters",
        "clustered-tail",
        "keep=",
        "masks/mask.py",
        "mask.py",
        "methods/",
        # names of other packages
        "torch.nn.Module",
        "nn.DataParallel",
        "torchrun",
        "None",
        # what is not a name
        "python -m subquad",
        "subquad plan --save",
        "(B,H,N)",
        "{0: 512}",
        "q_0 + K",
        '"ring"',
        "2·w",
        "--save",
        "0:full+700:i-clustered:clusters=25;topk=16",
    ],
)
def test_other_texts_are_let_through(found, text):
    assert found(text) == []


def test_names_of_an_example_are_known_below_it(tmp_path):
    path = tmp_path / "example.py"
    path.write_text(
        '"""Use it:\n\n    class Mine(Method): ...\n    made = 1\n\nThen `Mine`, `made` and `Yours`."""\n', "utf-8"
    )
    assert list(stale_names([path], library())) == ["example.py:6: Yours"]


def test_names_of_a_text():
    names = {"sq.swap", "model", "keep", "first", "layers", "name"}
    assert set(names_in("sq.swap(model, keep=first).layers[0].name")) == names
    assert list(names_in("around(name of the kernel)")) == ["around"]
    assert list(names_in("pip install")) == []
