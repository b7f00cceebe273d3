"""Peak extra memory of one call, in a process of its own: `python -m subquad.tools.bench.extra_memory` and a JSON line.

The process loads what it needs and starts its threads on a short call first; the inputs are there before the count.
"""

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from typing import Any

import torch

from subquad.tools.bench.calls import Calls, Load
from subquad.tools.measure.resident import Peak, peak_extra

SHORT = 256  # tokens of the call before: enough for all threads to have work
# glibc keeps freed memory and hands it out again unseen. Above this size it gives it back at once.
RETURN_AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def extra_memory(load: Load, method: str, threads: int | None = None) -> Peak:
    """Peak extra memory of one call of a method on a load; None with the reason where it cannot be told."""
    job = json.dumps({"load": asdict(load), "method": method, "threads": threads})
    done = subprocess.run(
        [sys.executable, "-m", __name__, job],
        capture_output=True,
        text=True,
        env=os.environ | RETURN_AT_ONCE,
        check=False,
    )
    if done.returncode < 0:
        return Peak(None, f"the process was ended by signal {-done.returncode}; out of memory, most likely")
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return Peak(None, f"the process failed: {last}")
    return Peak(**json.loads(done.stdout))


def _measured(job: dict[str, Any]) -> Peak:
    if job["threads"] is not None:
        torch.set_num_threads(job["threads"])
    load = Load(**job["load"])
    short = Calls(replace(load, length=min(load.length, SHORT)))
    short.call_of(job["method"])()
    del short
    return peak_extra(Calls(load).call_of(job["method"]), torch.device(load.device))


if __name__ == "__main__":
    print(json.dumps(asdict(_measured(json.loads(sys.argv[1])))))
