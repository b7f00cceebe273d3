"""Peak memory as the system sees it: in a process of its own, as the count is of the whole process."""

import json
import os
import subprocess
import sys

import pytest

from subquad.tools.bench.extra_memory import RETURN_AT_ONCE
from subquad.tools.measure import resident

SCRIPT = """
import json, torch
from subquad.tools.measure import resident

MIB = 2**20
def touched(mib):
    return torch.ones(mib * MIB, dtype=torch.uint8)
def temporary():
    touched(64)
    touched(64)
    return touched(1)
before = touched(100)
calls = {
    "output": lambda: touched(64),
    "both": lambda: (touched(64), touched(64)),
    "temporaries": temporary,
    "nothing": lambda: before.max(),
    "untouched": lambda: torch.empty(64 * MIB, dtype=torch.uint8),
    "outside of torch": lambda: bytearray(64 * MIB),
}
before.max()
found = {name: resident.peak_extra(call).bytes / MIB for name, call in calls.items()}
resident._forget_peak = lambda: False
earlier = touched(300)
del earlier
peak = resident.peak_extra(lambda: touched(400))
found["without a reset"], found["how"] = peak.bytes / MIB, peak.method
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, env=os.environ | RETURN_AT_ONCE
    )
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's /proc")
@pytest.mark.parametrize(("call", "mib"), [
    ("output", 64),
    ("both", 128),
    ("temporaries", 64),
    ("nothing", 0),
    ("untouched", 0),
    ("outside of torch", 64),
])  # fmt: skip
def test_what_a_call_adds(found, call, mib):
    assert found[call] == pytest.approx(mib, abs=4)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's /proc")
def test_where_the_peak_cannot_be_reset_an_earlier_one_hides_a_part_and_that_is_said(found):
    assert found["without a reset"] == pytest.approx(100, abs=8)
    assert "at least" in found["how"]


def test_a_system_that_does_not_tell_gives_a_reason(monkeypatch):
    monkeypatch.setattr(resident, "_forget_peak", lambda: False)
    monkeypatch.setattr(resident.sys, "platform", "win32")
    peak = resident.peak_extra(lambda: pytest.fail("must not run"))
    assert (peak.bytes, peak.method) == (None, "this system does not tell a process its peak memory")
