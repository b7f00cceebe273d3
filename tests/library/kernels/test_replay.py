"""Kernels replayed by a program without Python: in each variant of this processor, and of 64-bit ARM in an emulator.

They equal the reference in fp64. Of a speed, the emulator shows nothing.
"""

import shutil
from pathlib import Path

import pytest
from jaxtyping import config as jaxtyping_config

from subquad.kernels import native
from tests.library.kernels.replay import arm, cases

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(native.refusal() is not None, reason=f"no compiled kernels: {native.refusal()}"),
]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of all cases, in which no kernel is missing."""
    jaxtyping_config.update("jaxtyping_disable", True)  # until the end of the test: other tests check the ops' shapes
    file = tmp_path_factory.mktemp("replay") / "cases"
    assert cases.write(file) == set(native.described()["kernels"])
    return file


def assert_all_ran(printed: str, variants: list[str]) -> None:
    """Each kernel ran in each variant, and was compared."""
    lines = [line.split() for line in printed.splitlines()]
    assert {(line[0], line[1].rstrip(":")) for line in lines if int(line[4]) > 0} == {
        (variant, kernel) for variant in variants for kernel in native.described()["kernels"]
    }


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler, c++")
def test_each_variant_of_this_processor(recorded: Path, tmp_path: Path):
    program, library = tmp_path / "replay", Path(native.__file__).with_name(native._FILE)
    arm.run("c++", "-std=c++20", "-O1", arm.SOURCE, "-o", program, "-ldl")
    assert_all_ran(arm.run(program, library, recorded), native.variants())


@pytest.mark.skipif(bool(arm.MISSING), reason=f"no {', '.join(arm.MISSING)}: {arm.INSTALL}")
def test_each_variant_of_arm(recorded: Path, tmp_path: Path):
    """The variant with bf16 on a processor that has it, and on one without it all that are offered there."""
    arm.build(tmp_path)
    assert_all_ran(arm.replay(tmp_path, recorded, "neonbf16"), ["neonbf16"])
    assert_all_ran(arm.replay(tmp_path, recorded, processor="cortex-a72"), ["neon"])
