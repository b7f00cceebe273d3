"""Programs that leave Python: compiled for several lengths, exported with a dynamic one, converted to ONNX."""

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

import subquad as sq

ROOT = Path(__file__).parents[1]
METHODS = {name: str(cls(**cls.traits.example)) for name, cls in sq.methods.METHODS.items()}

# Which methods are not exported for every length that `tests.exported` tries, at the settings of their examples: the
# lengths for which their programs refuse, or None where there is no program for more than one length; and why.
FEW = "all but those of a single block or of very few tokens, whose shapes the tracer treats apart"
NOT_EVERY_LENGTH: dict[str, tuple[list[int] | None, str]] = {
    "local": ([3], FEW),
    "mixed-heads": ([3], FEW),
    "smyrf": ([3], FEW),
    "reformer": ([3], FEW),
    "routing": ([3], FEW),
    "cluster-former": ([3], FEW),
    "sinkhorn": ([3], FEW),
    "learned-feature-map": (
        [3, 17, 33, 49],
        "multiples of `window` where the traced length is one: others are filled up, which is another program",
    ),
    "rfa": (
        [64, 100],
        "causal: those with as many chunks of 64 tokens as the traced length, because each chunk is a traced step",
    ),
    "tilted-pool": (None, "the traced one alone: the layout of the segments is computed from the length"),
}

# Which methods are not compiled once for all lengths, and why.
NOT_COMPILED_ONCE: dict[str, str] = {
    "rfa": "causal: a traced step for each chunk of 64 tokens",
    "tilted-pool": "the layout of the segments is computed from the length",
}


# The methods whose programs CI makes; `pytest -m long tests/test_exits.py` makes those of all others.
IN_CI = ("i-clustered", "local", "lha-tail", "linear", "nystrom")


def each(names: Iterable[str]) -> list:
    """The methods as parameters, those that CI leaves out marked."""
    return [name if name in IN_CI else pytest.param(name, marks=pytest.mark.long) for name in names]


def asked(module: str, methods: list[str]) -> list:
    """What a process of its own says about these methods."""
    done = subprocess.run(
        [sys.executable, "-m", module], input=json.dumps(methods), capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("name", each(name for name in METHODS if name not in NOT_COMPILED_ONCE))
def test_compiled_for_three_lengths_equals_eager(name):
    ((failure,),) = asked("tests.compiled_lengths", [METHODS[name]])
    assert failure is None, failure


@pytest.mark.slow
@pytest.mark.parametrize("name", each(METHODS))
def test_exported_with_a_dynamic_length_equals_eager(name):
    ((_, outcomes),) = asked("tests.exported", [METHODS[name]])
    refused, _ = NOT_EVERY_LENGTH.get(name, ([], ""))
    if refused is None:
        assert isinstance(outcomes, str), f"{name} is exported now: {outcomes}"
        assert outcomes.startswith(f"ValueError: {name!r}"), outcomes
        return
    wanted = {length: "refused" if int(length) in refused else "equal" for length in outcomes}
    assert outcomes == wanted


def test_the_page_on_exports_says_which_lengths():
    page = (ROOT / "docs" / "how-to" / "export.md").read_text()
    for name, (_, why) in NOT_EVERY_LENGTH.items():
        assert f"| `{name}` | {why} |" in page
