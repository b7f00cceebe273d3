"""A swapped model that is exported with a dynamic length is right at every length."""

import json

import pytest

from tests.forks import output_of
from tests.library.hf.exported_swaps import LENGTHS

CASES = ["bert=full", "llama=full", "llama=full:kernel=subquad", "bert=clustered-tail"]


@pytest.mark.slow
def test_exported_models_are_right_at_every_length():
    results = json.loads(output_of("tests.library.hf.exported_swaps", *CASES).splitlines()[-1])
    assert dict(zip(CASES, results, strict=True)) == {case: {str(n): "equal" for n in LENGTHS} for case in CASES}
