"""A process of pytest for one kind of tests of the Triton kernels."""

import os
import subprocess
import sys
from pathlib import Path

# The folders of each kind. On a GPU the cases of the interpreter run once more, compiled.
KINDS = {"interpreted": ("interpreted",), "compiled": ("compiled",), "cuda": ("cuda", "interpreted")}
FOLDERS = sorted({folder for folders in KINDS.values() for folder in folders})
CHOSEN = "SUBQUAD_TRITON_TESTS"  # the kind that pytest collects; by default none


def run(kind: str, *arguments: str, **options: object) -> int:
    """Run the tests of one kind; the exit status of pytest. Without paths under tests/, all tests of the kind."""
    assert kind in KINDS, f"{kind!r} is not one of {', '.join(KINDS)}"
    environment = os.environ | {
        CHOSEN: kind,
        "TRITON_INTERPRET": str(int(kind == "interpreted")),
        "OMP_NUM_THREADS": "1",
    }
    folders = [str(Path(__file__).with_name(folder).relative_to(Path.cwd())) for folder in KINDS[kind]]
    plain = ("-o", "addopts=--strict-markers -ra -m 'not long'", "-p", "no:cacheprovider", "-q")
    named = any(argument.startswith("tests/") for argument in arguments)
    command = [sys.executable, "-m", "pytest", *plain, *arguments, *([] if named else folders)]
    return subprocess.run(command, env=environment, **options).returncode  # type: ignore[call-overload, no-any-return]
