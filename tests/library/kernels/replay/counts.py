"""Instructions of each kernel on 64-bit ARM, counted in the emulator, on one thread; they are no times.

    python -m tests.library.kernels.replay.counts [FOLDER]

The library is built into FOLDER, or into a temporary one. Counted is what one more call of a kernel adds to a case.
"""

import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.library.kernels.replay import arm, cases
from tests.library.kernels.replay.recording import file_of

VARIANTS = "neon", "neonbf16"


def count(folder: Path) -> None:
    """Print a row for each kernel and dtype, of the first case that has it."""
    plugin, file, counted = folder / "libcount.so", folder / "case", set()
    arm.run("cc", "-shared", "-fPIC", "-O1", Path(__file__).with_name("count.c"), "-o", plugin)

    def instructions(variant: str) -> int:
        printed = arm.replay(folder, file, variant, plugin=plugin)
        return int(re.findall(r"(\d+) instructions", printed)[0])

    print("| kernel | case | " + " | ".join(VARIANTS) + " |\n| --- | --- |" + " ---: |" * len(VARIANTS))
    for name, (dtype, _) in cases.CASES.items():
        recording = cases.record(name, threads=1)
        calls = recording.calls.copy()
        file.write_bytes(file_of({name: recording}))
        before = [instructions(variant) for variant in VARIANTS]
        for kernel, arguments in calls:
            if (kernel, dtype) in counted:
                continue
            counted.add((kernel, dtype))
            recording.calls = [*calls, (kernel, arguments)]
            file.write_bytes(file_of({name: recording}))
            more = [instructions(variant) - least for variant, least in zip(VARIANTS, before, strict=True)]
            print(f"| `{kernel}` | {name} | " + " | ".join(f"{each:,}" for each in more) + " |", flush=True)


if __name__ == "__main__":
    with TemporaryDirectory() as temporary:
        folder = Path(sys.argv[1] if len(sys.argv) > 1 else temporary)
        arm.build(folder)
        count(folder)
