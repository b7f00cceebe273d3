"""Programs that leave Python: compiled for several lengths, exported with a dynamic one, converted to ONNX."""

import json
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

import subquad as sq
from tests.forks import output_of

ROOT = Path(__file__).parents[2]
METHODS = {name: str(cls(**cls.traits.example)) for name, cls in sq.methods.METHODS.items()}

# Which methods are not exported for every length that `tests.library.exported` tries, at the settings of their
# examples: the lengths for which their programs refuse, or None where there is no program for more than one length;
# and why.
FEW = "all but lengths of a single block or of very few tokens, whose shapes the tracer treats as special cases"
NOT_EVERY_LENGTH: dict[str, tuple[list[int] | None, str]] = {
    "local": ([3], FEW),
    "bigbird": ([3], FEW),
    "fixed": ([3], FEW),
    "longformer": ([3, 17], FEW),
    "strided": (
        [3, 100],
        "all lengths on the same side of 16 · `stride` tokens as the traced length, except very short ones",
    ),
    "logsparse": ([3, 17, 100], "lengths between the same two powers of two as the traced length"),
    "keep": ([3], FEW),
    "sum": ([3], FEW),
    "mixed-heads": ([3], FEW),
    "smyrf": ([3], FEW),
    "reformer": ([3], FEW),
    "routing": ([3], FEW),
    "cluster-former": ([3], FEW),
    "sinkhorn": ([3], FEW),
    "learned-feature-map": (
        [3, 17, 33, 49],
        "if the traced length is a multiple of `window`, only multiples of `window`, because other lengths are padded, "
        "which is another program",
    ),
    "rfa": (
        [64, 100],
        "causal: those with as many chunks of 64 tokens as the traced length, because each chunk is a traced step",
    ),
    "tilted-pool": (None, "only the traced length: the layout of the pools is computed from the length"),
}

# Which methods are not compiled once for all lengths, and why.
NOT_COMPILED_ONCE: dict[str, str] = {
    "rfa": "causal: a traced step for each chunk of 64 tokens",
    "tilted-pool": "the layout of the pools is computed from the length",
    "logsparse": "one program for the lengths between two powers of two",
}


# The methods whose programs CI makes; `pytest -m long tests/library/test_exits.py` makes those of all others.
IN_CI = ("i-clustered", "local", "lha-tail", "linear", "nystrom")


def each(names: Iterable[str]) -> list:
    """The methods as parameters: those of CI in one process, which starts once, and each other in one of its own."""
    names = list(names)
    alone = [pytest.param([name], marks=pytest.mark.long, id=name) for name in names if name not in IN_CI]
    return [pytest.param([name for name in names if name in IN_CI], id="in CI"), *alone]


def asked(module: str, methods: list) -> list:
    """Return what a separate process says about these methods."""
    return [json.loads(line) for line in output_of(module, stdin=json.dumps(methods)).splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("names", each(name for name in METHODS if name not in NOT_COMPILED_ONCE))
def test_compiled_for_three_lengths_equals_eager(names):
    (failures,) = asked("tests.library.compiled_lengths", [METHODS[name] for name in names])
    assert dict(zip(names, failures, strict=True)) == dict.fromkeys(names)


FOLLOWING_THE_LENGTH = """
import sys, torch, subquad as sq
for method in sys.argv[1:]:
    torch._dynamo.reset()
    attend = lambda x: sq.attention(x, x, x, method=method)
    compiled = torch.compile(attend, fullgraph=True, backend="eager")
    for length in (300, 200, 128):  # from the second on, lengths are symbolic; the root of 2·128 is a whole number
        x = torch.randn(1, 2, length, 16)
        torch.testing.assert_close(compiled(x), attend(x))
"""


@pytest.mark.slow
def test_settings_that_follow_the_length_compile_into_one_graph():
    methods = ["clustered-tail", "by-length:steps=0:full+150:clustered:clusters=8"]
    done = subprocess.run([sys.executable, "-c", FOLLOWING_THE_LENGTH, *methods], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("names", each(METHODS))
def test_exported_with_a_dynamic_length_equals_eager(names):
    said = asked("tests.library.exported", [METHODS[name] for name in names])
    for name, (_, outcomes) in zip(names, said, strict=True):
        refused, _ = NOT_EVERY_LENGTH.get(name, ([], ""))
        if refused is None:
            assert isinstance(outcomes, str), f"{name} is exported now: {outcomes}"
            assert outcomes.startswith(f"ValueError: {name!r}"), outcomes
        else:
            wanted = {length: "refused" if int(length) in refused else "equal" for length in outcomes}
            assert outcomes == wanted, name


def test_the_offset_of_a_causal_mask_may_follow_the_length(unchecked):
    class LastTwo(torch.nn.Module):
        def forward(self, x):
            return sq.attention(x[:, :, -2:], x, x, mask=sq.Mask.causal(offset=x.shape[2] - 2), method="full")

    length = torch.export.Dim.DYNAMIC
    program = torch.export.export(LastTwo(), (torch.randn(1, 2, 20, 8),), dynamic_shapes=({2: length},)).module()
    x = torch.randn(1, 2, 30, 8)
    torch.testing.assert_close(program(x), LastTwo()(x))


def test_the_page_on_exports_says_which_lengths():
    page = (ROOT / "docs" / "how-to" / "export.md").read_text()
    section = page.split("\n## torch.export\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.+`) \| (.+) \|$", section, re.MULTILINE)
    listed = {name: why for names, why in rows for name in re.findall(r"`([\w-]+)`", names)}
    assert listed == {name: why for name, (_, why) in NOT_EVERY_LENGTH.items()}


# ---------------------------------------------------------------------- ONNX

CONVERTED = [
    ("full", True),
    ("local:window=8", False),
    ("local:window=8", True),
    ("linear", False),
    ("clustered:clusters=5", False),
    ("i-clustered:clusters=5,topk=6", False),
    pytest.param("clustered", False, marks=pytest.mark.long),  # with more clusters than tokens where it is traced
    pytest.param("clustered-tail:clusters=5,topk=6,cells=4", False, marks=pytest.mark.long),
]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "causal"), CONVERTED)
def test_onnx_programs_equal_eager_ones(method, causal):
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    (outcomes,) = asked("tests.library.converted", [(method, causal)])
    assert isinstance(outcomes, dict), outcomes
    assert max(outcomes.values()) < 1e-5, outcomes


CHECKED = """
import json, sys, torch, subquad as sq
from unittest.mock import patch

def exported(method, causal, dynamic):
    attend = type("Attend", (torch.nn.Module,), {
        "forward": lambda self, x: sq.attention(x, x, x, method=method, is_causal=causal)
    })
    shapes = ({2: torch.export.Dim.DYNAMIC if dynamic else None},)
    with patch("torch.onnx.is_in_onnx_export", lambda: True):
        torch.export.export(attend(), (torch.randn(1, 2, 60, 16),), dynamic_shapes=shapes)

def refusal(*arguments):
    try:
        exported(*arguments)
    except Exception as error:
        return str(error)

print(json.dumps([[refusal(*case, dynamic) for dynamic in (True, False)] for case in json.loads(sys.argv[1])]))
"""
RIGHT_AT_EVERY_LENGTH = [
    ("bigbird:block=4", False, False),
    ("by-length:steps=0:full+50:clustered:clusters=5", False, False),
    ("i-clustered:clusters=5", True, False),
    ("i-clustered:clusters=5", False, True),
]


@pytest.mark.slow
def test_onnx_programs_that_are_right_at_some_lengths_only_are_refused():
    cases = json.dumps([(method, causal) for method, causal, _ in RIGHT_AT_EVERY_LENGTH])
    done = subprocess.run([sys.executable, "-c", CHECKED, cases], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for case, (dynamic, fixed) in zip(RIGHT_AT_EVERY_LENGTH, json.loads(done.stdout.splitlines()[-1]), strict=True):
        assert fixed is None, case
        if case[-1]:
            assert dynamic is None, case
        else:
            why = "is not converted to ONNX with a dynamic length, because the program would be right"
            assert why in (dynamic or "exported"), case


DIVIDED = """
import operator, torch, subquad as sq
from unittest.mock import patch

class Truncating(torch.fx.Interpreter):
    "As ONNX Runtime computes: divisions of lengths are rounded towards zero, whole numbers are added up in fp64."

    def call_function(self, target, args, kwargs):
        if target is operator.floordiv:
            return int(args[0] / args[1])
        out = super().call_function(target, args, kwargs)
        if target is torch.ops.aten.sum.dim_IntList and out.dtype == torch.int64:
            return args[0].double().sum(*args[1:], **kwargs).long()
        return out

for method in ("local:window=8", "clustered:clusters=5"):
    attend = type("Attend", (torch.nn.Module,), {"forward": lambda self, x: sq.attention(x, x, x, method=method)})()
    x = torch.randn(1, 2, 60, 16)
    with patch("torch.onnx.is_in_onnx_export", lambda: True):
        program = torch.export.export(attend, (x,), dynamic_shapes=({2: torch.export.Dim.DYNAMIC},))
    for length in (33, 60, 100):
        x = torch.randn(1, 2, length, 16)
        torch.testing.assert_close(Truncating(program.module()).run(x), attend(x), atol=1e-5, rtol=1e-4)
"""


@pytest.mark.slow
def test_programs_are_right_where_divisions_truncate_and_sums_are_in_fp64():
    done = subprocess.run([sys.executable, "-c", DIVIDED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_page_on_exports_says_which_methods_are_converted_to_onnx():
    section = (ROOT / "docs" / "how-to" / "export.md").read_text().split("\n## ONNX\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.+) \| (exported|refused) \|", section, re.MULTILINE)
    listed = {name: said for names, said in rows for name in re.findall(r"`([\w-]+)`", names) if name in METHODS}
    support = {"always": "exported", "without causal masks": "refused"}
    assert listed == {name: support[cls.onnx] for name, cls in sq.METHODS.items() if cls.onnx != "no"}
