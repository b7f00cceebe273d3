import pytest

import tests.libraries  # noqa: F401
from subquad.tools.models.pretrained import load
from subquad.tools.needle.prompts import Haystack
from tests.tools.workflows import tiny


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    """The folder of a tiny decoder with 512 positions."""
    return str(tiny.save("llama", tmp_path_factory.mktemp("needle") / "llama"))


@pytest.fixture(scope="session")
def pretrained(llama):
    return load(llama)


@pytest.fixture(scope="session")
def haystack(pretrained):
    return Haystack(pretrained, pretrained.content_ids(" ".join(tiny.documents())))
