"""A process of pytest for one kind of tests of the Triton kernels."""

import os
import subprocess
import sys
from pathlib import Path

KINDS = ("interpreted", "compiled")
CHOSEN = "SUBQUAD_TRITON_TESTS"  # the kind that pytest collects; by default none


def run(kind: str, *arguments: str, **options: object) -> int:
    """Run the tests of one kind; the exit status of pytest."""
    assert kind in KINDS, f"{kind!r} is not one of {KINDS}"
    environment = os.environ | {
        CHOSEN: kind,
        "TRITON_INTERPRET": str(int(kind == "interpreted")),
        "OMP_NUM_THREADS": "1",
    }
    folder = str(Path(__file__).with_name(kind).relative_to(Path.cwd()))
    plain = ("-o", "addopts=--strict-markers -ra -m 'not long'", "-p", "no:cacheprovider", "-q")
    named = any("tests/triton" in argument for argument in arguments)
    command = [sys.executable, "-m", "pytest", *plain, *arguments, *(() if named else (folder,))]
    return subprocess.run(command, env=environment, **options).returncode  # type: ignore[call-overload, no-any-return]
