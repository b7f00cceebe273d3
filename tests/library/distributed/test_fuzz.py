"""A slice of the fuzz program: random calls over ranks equal those of one process."""

import json
import subprocess
import sys
from random import Random

import pytest
import torch

from tests.library.distributed import fuzz
from tests.library.distributed.launch import ROOT


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_random_calls_over_ranks_equal_one_process(ranks: int):
    words = [sys.executable, "-m", "tests.library.distributed.fuzz", "--cases", "40", "--ranks", str(ranks)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    counts = json.loads(done.stdout)
    assert counts["findings"] == 0
    assert counts["compared"] + counts["alone"] >= 30


def test_what_is_drawn_follows_from_the_seed():
    first, again, other = (fuzz.drawn_call(Random(seed), 2, []) for seed in ("0/3", "0/3", "0/4"))
    assert str(first) == str(again) != str(other)
    assert all(torch.equal(x, again.inputs[name]) for name, x in first.inputs.items())


def test_an_error_in_one_number_is_found():
    want = torch.ones(2, 3)
    have = want.clone()
    assert fuzz.apart(want, have) == 0
    have[1, 2] = 1.5
    assert fuzz.apart(want, have) == 0.5
    have[1, 2] = torch.nan
    assert fuzz.apart(want, have) == torch.inf
