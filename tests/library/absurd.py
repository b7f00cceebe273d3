"""Run every method with absurd settings on 64 tokens, under limits of memory and time, and print what became of each.

A process of its own, which forks once for each call: a call that hangs or allocates without end takes nothing with it.
"""

import json
import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import torch

import subquad as sq
from subquad.testing.oracle import qkv

ABSURD, TOKENS = 10**8, 64
MEMORY, SECONDS = 3 << 29, 60
MORE = (
    "lsh:buckets=0,bucket_size={n}",
    "lsh:tail=4,buckets={n}",
    "lsh:tail={n},buckets={n}",
    "lsh:selection=argmax,buckets={n}",
    "lsh:hash=random,buckets={n}",
    "lha:buckets=0,bucket_size={n}",
    "lha:selection=argmax,buckets={n}",
    "lha-tail:buckets={n},cells={n}",
    "smyrf:cluster_size={n}",
    "routing:cluster_size={n},clusters={n}",
    "sinkhorn:cut={n},block=4",
    "sinkhorn:cut=2,block={n}",
    "tilted-pool:window=0,pools={n}",
    "tilted-pool:pools=0,window={n}",
    "local:window={n},positions=relative",
    "performer:rows=independent,features={n}",
    "linformer:projection=mean,k={n}",
    "mixed-heads:methods=local:window={n}+lsh:buckets={n}",
    "local:window={n}+lsh:buckets={n}+keep:first={n}",
    "local:window=2+lsh:buckets=64+keep:every={n}+clustered-tail:cells={n}",
)


def texts() -> Iterator[str]:
    """Every whole-number setting of every method by itself, beside those of its example; and some together."""
    for name, cls in sq.methods.METHODS.items():
        for setting, default in cls.defaults().items():
            if type(default) is int and setting != "seed":
                settings = {**cls.traits.example, setting: ABSURD}
                yield f"{name}:{','.join(f'{each}={value}' for each, value in settings.items())}"
    yield from (text.format(n=ABSURD) for text in MORE)


def outcome(text: str) -> str:
    """`ran` for finite outputs, else the error."""
    q, k, v = (x.requires_grad_() for x in qkv(TOKENS, E=8))
    try:
        method = sq.methods.parse_method(text)
        runs = method.bind(heads=2, head_dim=8, max_length=TOKENS) if method.traits.learned else method
        out = runs(q, k, v)
        out.sum().backward()
        return "ran" if out.isfinite().all() else "gave what is not finite"
    except ValueError as error:
        return f"ValueError: {error}"
    except BaseException as error:
        return f"{type(error).__name__}: {str(error)[:200]}"


def in_a_fork(text: str) -> str:
    """The outcome, from a process with limits."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(SECONDS)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
        os.write(writing, outcome(text).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    return said or f"ended by signal {os.WTERMSIG(status)}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    outcome("i-clustered")  # what torch imports at the first call takes longer than the calls themselves
    with sq.use_backend(sys.argv[1]) if len(sys.argv) > 1 else nullcontext():
        for text in texts():
            print(json.dumps([text, in_a_fork(text)]), flush=True)
