"""The native library and `replay.cpp` for 64-bit ARM: cross-compiled, and run in an emulator."""

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[4]
SOURCE = Path(__file__).with_name("replay.cpp")
CROSS, EMULATOR, SYSROOT = "aarch64-linux-gnu-g++", "qemu-aarch64", "/usr/aarch64-linux-gnu"
MISSING = [name for name in (CROSS, EMULATOR, "cmake", "ninja") if shutil.which(name) is None]
INSTALL = "apt install g++-aarch64-linux-gnu qemu-user cmake ninja-build"


def run(*command: str | Path) -> str:
    """Return what a command prints.

    Raises:
        RuntimeError: it failed.
    """
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{command[0]} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return done.stdout + done.stderr


def build(folder: Path) -> None:
    """Compile the library and the program into a folder."""
    system = "-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64", f"-DCMAKE_CXX_COMPILER={CROSS}"
    run("cmake", "-S", ROOT, "-B", folder, "-G", "Ninja", *system)
    run("cmake", "--build", folder)
    run(CROSS, "-std=c++20", "-O1", SOURCE, "-o", folder / "replay", "-ldl")


def replay(folder: Path, file: Path, *variants: str, processor: str = "max", plugin: Path | None = None) -> str:
    """Return what the program prints in the emulator, on a processor that QEMU knows by this name."""
    options = [] if plugin is None else ["-plugin", plugin]
    program = folder / "replay", folder / "libsubquad.so", file
    return run(EMULATOR, "-cpu", processor, "-L", SYSROOT, *options, *program, *variants)
