"""A served model under load: the service of examples/serve in processes of its own, and a client on the same machine.

    python benchmarks/serve.py FOLDER [--requests 200] [--concurrency 8] [--out FILE.md]

FOLDER is what `subquad plan --save FOLDER` wrote. Needs the extras `serve` and `test`.
"""

import importlib
import os
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import httpx
import sheet

EXAMPLE = Path(__file__).parents[1] / "examples" / "serve"
HOST = "127.0.0.1"
PATIENCE = 180  # seconds in which a service must start
MIB = 1024

# What is served in which way: threads, workers, and settings of the service.
WAYS: dict[str, tuple[int, int, dict[str, str]]] = {
    "the plan": (2, 1, {}),
    "the plan, batches of at most 8,192 tokens": (2, 1, {"SERVE_BATCH_TOKENS": "8192"}),
    "the plan, each text alone": (2, 1, {"SERVE_BATCH_TOKENS": "1", "SERVE_WAIT_MS": "0"}),
    "the plan, 2 workers with 1 thread": (1, 2, {}),
    "exact attention": (2, 1, {"SERVE_EXACT": "1"}),
}
# Share of the requests, words, and a seed with which no text is longer than 2,048 tokens.
LOADS = {"Texts of all lengths": (1.0, 4, 700, 0), "Long texts": (0.3, 450, 650, 4)}
HEAD = ["served", "requests", "errors", "p50 ms", "p95 ms", "p99 ms", "requests/s", "tokens/s", "peak MiB"]
HEAD += ["audited", "mean cosine", "alarms"]


class Running(NamedTuple):
    """A service that answers."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path


def load_module() -> Any:
    """The client of the example, `load.py`."""
    if str(EXAMPLE) not in sys.path:
        sys.path.append(str(EXAMPLE))
    return importlib.import_module("load")


@contextmanager
def running(
    folder: Path, log: Path, settings: Mapping[str, str] | None = None, threads: int = 2, workers: int = 1
) -> Iterator[Running]:
    """The service of a folder, in processes of its own; it ends with the block."""
    with socket.socket() as free:
        free.bind((HOST, 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "uvicorn", "app:app", "--app-dir", str(EXAMPLE), "--host", HOST]
    command += ["--port", str(port), "--workers", str(workers), "--no-access-log"]
    environment = os.environ | {"SERVE_MODEL": str(folder), "OMP_NUM_THREADS": str(threads)} | dict(settings or {})
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        service = Running(f"http://{HOST}:{port}", process, log)
        wait_for(service)
        yield service
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def wait_for(service: Running) -> None:
    """Wait until a service is healthy; RuntimeError with the end of its log if it ends or does not answer."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and service.process.poll() is None:
        with suppress(httpx.HTTPError):
            if httpx.get(f"{service.url}/health", timeout=5).status_code == 200:
                return
        time.sleep(0.2)
    raise RuntimeError(f"the service did not start:\n{service.log.read_text('utf-8', errors='replace')[-3000:]}")


def peak_memory(process: subprocess.Popen[bytes]) -> int | None:
    """The largest resident memory of a process and its children in MiB, added up; None without /proc."""
    try:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        status = [Path(f"/proc/{number}/status").read_text() for number in (process.pid, *children)]
    except OSError:
        return None
    peaks = [int(found[1]) for text in status if (found := re.search(r"VmHWM:\s+(\d+) kB", text))]
    return sum(peaks) // MIB


def table(folder: Path, texts: list[str], concurrency: int, rounds: int, scratch: Path) -> str:
    """A line about the texts, and a row for each way of serving.

    All services run at the same time, and one of them has work: in each round every one of them gets the same share of
    the texts, in random order, so that all meet the same noise of the machine.
    """
    load, chance = load_module(), random.Random(0)
    answers: dict[str, list[Any]] = {name: [] for name in WAYS}
    seconds = dict.fromkeys(WAYS, 0.0)
    with ExitStack() as stack:
        services = {
            name: stack.enter_context(running(folder, scratch / f"{number}.log", settings, threads, workers))
            for number, (name, (threads, workers, settings)) in enumerate(WAYS.items())
        }
        for service in services.values():
            load.sent(service.url, texts[: 2 * concurrency], concurrency)  # connections, and caches of memory
        for number in range(rounds):
            for name in chance.sample(list(WAYS), len(WAYS)):
                some, taken = load.sent(services[name].url, texts[number::rounds], concurrency)
                answers[name] += some
                seconds[name] += taken
        figures = {
            name: load.figures(answers[name], seconds[name], load.scraped(service.url))
            for name, service in services.items()
        }
        memory = {name: peak_memory(service.process) for name, service in services.items()}
    sizes = next(iter(figures.values()))
    shortest, median, longest = (f"{sizes[f'tokens, {name}']:,}" for name in load.SIZES)
    rows = [[name, *cells(each, memory[name], WAYS[name][1] == 1)] for name, each in figures.items()]
    return f"{shortest} to {longest} tokens, in the median {median}.\n\n{sheet.table(HEAD, rows)}"


def cells(figures: Mapping[str, float], memory: int | None, of_audit: bool) -> list[str]:
    """The cells of a row; /metrics answers for one worker, so `of_audit` is false where there are several."""
    audited = of_audit and figures["audited share"] > 0
    return [
        f"{figures['requests']:,}",
        f"{figures['errors']:,}",
        *(f"{figures[f'p{share} ms']:,.0f}" for share in (50, 95, 99)),
        f"{figures['requests per second']:.1f}",
        f"{figures['tokens per second']:,.0f}",
        sheet.MISSING if memory is None else f"{memory:,}",
        f"{100 * figures['audited share']:.1f} %" if audited else sheet.MISSING,
        f"{figures['fidelity']:.4f}" if audited else sheet.MISSING,
        f"{figures['alarms']:.0f}" if audited else sheet.MISSING,
    ]


def main(folder: Path, requests: int = 200, concurrency: int = 8, rounds: int = 8, out: Path | None = None) -> None:
    load, parts = load_module(), []
    with TemporaryDirectory() as scratch:
        for title, (share, *words) in LOADS.items():
            texts = load.passages(load.LANGUAGE, round(share * requests), *words)
            found = table(folder, texts, concurrency, rounds, Path(scratch))
            parts.append(f"## {title}\n\n{found}")
    about = (
        "One text in each request: passages of Python's reference whose numbers of words are spread evenly on a "
        f"logarithmic scale, {concurrency} at a time, from a client on the same machine, in {rounds} "
        "rounds with a share of the texts for each service in turn. Latencies include the client's work. The memory is "
        "that of all processes of the service."
    )
    sheet.publish("A served model under load", [about, *parts], out)


if __name__ == "__main__":
    sheet.run(main)
