"""Instructions of each kernel on 64-bit ARM, counted in the emulator, on one thread; they are no times.

    python -m tests.library.kernels.replay.counts [FOLDER]

The library is built into FOLDER, or into a temporary one. Counted is what one more call of a kernel adds to a case.
"""

import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from tests.library.kernels.replay import arm, cases
from tests.library.kernels.replay.recording import Recording, file_of

VARIANTS = "neon", "neonbf16"


def count(folder: Path) -> None:
    """Print a row for each kernel and dtype, of the first case that has it."""
    plugin, file = folder / "libcount.so", folder / "case"
    counted: set[tuple[str, torch.dtype]] = set()
    arm.run("cc", "-shared", "-fPIC", "-O1", Path(__file__).with_name("count.c"), "-o", plugin)

    def instructions(name: str, recording: Recording) -> list[int]:
        file.write_bytes(file_of({name: recording}))
        printed = [arm.replay(folder, file, variant, plugin=plugin) for variant in VARIANTS]
        return [int(re.findall(r"(\d+) instructions", text)[0]) for text in printed]

    print("| kernel | case | " + " | ".join(VARIANTS) + " |\n| --- | --- |" + " ---: |" * len(VARIANTS))
    for name, (dtype, _) in cases.CASES.items():
        recording = cases.record(name, threads=1)
        calls = recording.calls
        first = {kernel: arguments for kernel, arguments in reversed(calls) if (kernel, dtype) not in counted}
        counted |= {(kernel, dtype) for kernel in first}
        before = instructions(name, recording) if first else []
        for kernel, arguments in first.items():
            recording.calls = [*calls, (kernel, arguments)]
            more = [after - least for after, least in zip(instructions(name, recording), before, strict=True)]
            print(f"| `{kernel}` | {name} | " + " | ".join(f"{each:,}" for each in more) + " |", flush=True)


if __name__ == "__main__":
    with TemporaryDirectory() as temporary:
        folder = Path(sys.argv[1] if len(sys.argv) > 1 else temporary)
        arm.build(folder)
        count(folder)
