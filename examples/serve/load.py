"""Sends texts of unequal lengths to a running service, several at a time, and prints latencies and what was audited.

python load.py --url http://127.0.0.1:8000 --requests 200 --concurrency 8
"""

import argparse
import asyncio
import json
import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import httpx

SIZES = {"shortest": 0.0, "median": 0.5, "longest": 1.0}
LANGUAGE = "\n".join(topics[name] for name in sorted(topics))  # Python's own reference


@dataclass(frozen=True)
class Answer:
    """The answer to one request: its seconds, and what the service returned."""

    text: str
    status: int
    seconds: float
    tokens: int = 0
    embedding: tuple[float, ...] = ()


def passages(source: str, count: int, shortest: int, longest: int, seed: int = 0) -> list[str]:
    """Passages at random places; their numbers of words are spread evenly on a logarithmic scale, in random order."""
    words, chance = source.split(), random.Random(seed)
    steps = max(count - 1, 1)
    sizes = [round(shortest * (longest / shortest) ** (number / steps)) for number in range(count)]
    chance.shuffle(sizes)
    starts = [chance.randrange(max(len(words) - size, 1)) for size in sizes]
    return [" ".join(words[start : start + size]) for start, size in zip(starts, sizes, strict=True)]


async def send(url: str, texts: Sequence[str], concurrency: int) -> list[Answer]:
    """Send each text as a request of its own, with at most `concurrency` at a time."""
    free = asyncio.Semaphore(concurrency)

    async def one(text: str) -> Answer:
        async with free:
            begun = time.perf_counter()
            try:
                response = await client.post("/embed", json={"texts": [text]})
            except httpx.HTTPError:
                return Answer(text, 0, time.perf_counter() - begun)
            seconds = time.perf_counter() - begun
        if response.status_code != 200:
            return Answer(text, response.status_code, seconds)
        found = response.json()
        return Answer(text, 200, seconds, found["tokens"][0], tuple(found["embeddings"][0]))

    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        return await asyncio.gather(*map(one, texts))


def sent(url: str, texts: Sequence[str], concurrency: int) -> tuple[list[Answer], float]:
    """The answers to all texts, and the seconds until the last one."""
    begun = time.perf_counter()
    return asyncio.run(send(url, texts, concurrency)), time.perf_counter() - begun


def scraped(url: str) -> dict[str, float]:
    """The metrics of the service that have no labels."""
    lines = httpx.get(f"{url}/metrics", timeout=30).text.splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#") and "{" not in line)
    return {name: float(value) for name, value in pairs}


def figures(answers: Sequence[Answer], seconds: float, metrics: Mapping[str, float]) -> dict[str, float]:
    """The figures of a load: latencies of the client, and the audit of the service since it started."""
    good = [answer for answer in answers if answer.status == 200]
    latencies, sizes = (sorted(getattr(answer, name) for answer in good) for name in ("seconds", "tokens"))
    inputs, audited = (metrics.get(f"subquad_audit_{name}", 0.0) for name in ("inputs", "inputs_audited"))
    return {
        "requests": len(answers),
        "errors": len(answers) - len(good),
        "seconds": seconds,
        "requests per second": len(good) / seconds,
        "tokens per second": sum(sizes) / seconds,
        **{f"p{share} ms": 1000 * percentile(latencies, share / 100) for share in (50, 95, 99)},
        **{f"tokens, {name}": percentile(sizes, share) for name, share in SIZES.items()},
        "batches": metrics["serve_batch_texts_count"],
        "audited share": audited / inputs if inputs else 0.0,
        "fidelity": metrics.get("subquad_audit_fidelity", math.nan),
        "alarms": metrics.get("subquad_audit_alarm", 0.0),
    }


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest number that at least this share of all numbers does not exceed; NaN of none."""
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)] if ordered else math.nan


def main() -> None:
    """Read the options, send the load, print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--words", type=int, nargs=2, default=(4, 200), help="in the shortest and the longest text")
    parser.add_argument("--text", type=Path, help="a file to take passages from; default: Python's reference")
    options = parser.parse_args()
    source = LANGUAGE if options.text is None else options.text.read_text("utf-8", errors="replace")
    answers, seconds = sent(options.url, passages(source, options.requests, *options.words), options.concurrency)
    print(json.dumps(figures(answers, seconds, scraped(options.url)), indent=1))


if __name__ == "__main__":
    main()
