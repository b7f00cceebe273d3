"""Whole requests in several engines: time to the first token, time of each later one, and of all, on the same prompts.

    python benchmarks/whole_requests.py --threads 2 --keep requests --out benchmarks/results/requests.md
    python benchmarks/whole_requests.py --engines "torch llama.cpp" --prompts 512 --turns 1

The model is "demo-decoder", a hub id or a folder; a request is a prompt of so many tokens of real text and
`--new-tokens` more, chosen greedily. An engine that is not installed is named with the command that installs it, and
the others are measured. `--keep FOLDER` keeps converted models and every request that was measured: a run continues
what is there, and the sheet has all rows of the folder. `--fresh` measures the rows of `--engines` again.
"""

import hashlib
import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import numpy as np
import sheet
import torch
import typer
from engine_models import pretrained
from engine_runs import check, documents_of, installed, installed_version, prepared, started
from engine_workers import EngineError, Worker
from request_engines import PACKAGES, Answer, Job, Row, prepare, rows_of

from subquad.core import files
from subquad.core.errors import InputError
from subquad.tools.measure.timing import shuffled
from subquad.tools.models.passages import read
from subquad.tools.models.pretrained import Pretrained, load

METHODS = ("full:kernel=subquad", "clustered-tail")
EXACT, USUAL = Row("torch", "fp32"), Row("torch", "bf16")
# Freed memory stays in a process, so that its pages are not fetched from the system again for each tensor.
KEPT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "4294967296", "MALLOC_TRIM_THRESHOLD_": "4294967296"}
TEXTS = 8  # prompts of each length, of which every turn takes the next

ABOUT = """\
Whole requests of {name}: a prompt of real text and {new} new tokens after it, chosen greedily, one request at a time, \
{threads} threads.
Every engine has a process of its own, each compiled row too, and all get the same token ids.
Memory that a process has freed stays in it: glibc's `MALLOC_MMAP_THRESHOLD_` and `MALLOC_TRIM_THRESHOLD_` are 4 GiB.
In every turn each row answers one request, in a new order, while the other processes wait; each turn has a text of \
its own.
Rows that the folder of `--keep` had already are of an earlier run on this machine.
Before the turns, each row answers a short request, during which `torch.compile` compiles, and which is not counted.
"First token" is the time until the first new token is there, "later token" the median time of each token after it, \
and "request" the time of all; medians over the turns.
The speed-up is that of the request over PyTorch's in bf16.
"Same tokens" says for each turn how many of the first new tokens are those of PyTorch in fp32.
PyTorch is `generate` of transformers with SDPA, and subquad the same in a swapped model.
Without another word the cache is the one that the engine makes; "growing" is `sq.hf.GrowingCache`; "static, compiled" \
is transformers' static cache with steps compiled by `torch.compile(fullgraph=True)` (`sq.hf.compiled_steps(length)`).
With "unguarded", Dynamo does not ask before each step whether the model is still the one that it compiled \
(`torch.compiler.set_stance(skip_guard_eval_unsafe=True)`), and torchao's weights are plain tensors \
(`torchao.utils.unwrap_tensor_subclass`).
The weights come from a file with 4 bits for each weight (Q4_1), which PyTorch's rows hold converted to fp32 or bf16; \
so here, unlike elsewhere, llama.cpp's 4 bits are the same weights, multiplied by inputs that are rounded to 8 bits.
With torchao, the weights of linear layers are rounded to 8 bits, one scale for each output, and computed with as bf16.
OpenVINO's int8 and int4 weights are rounded anew by `nncf.compress_weights`, and are another model; their cache has 8 \
bits, as by default, and that of OpenVINO's other rows the format of the row.
llama.cpp is built for this processor, with flash attention and a cache in fp16."""


@dataclass(frozen=True)
class Request:
    """A request that was measured."""

    text: str  # the prompt's digest
    answer: Answer
    load: float  # of the machine, when it ended

    @property
    def first(self) -> float:
        """Seconds to the first token."""
        return self.answer.seconds[0]

    @property
    def step(self) -> float:
        """The median time of a later token, in seconds."""
        return statistics.median(np.diff(self.answer.seconds).tolist())

    @property
    def whole(self) -> float:
        """Seconds to the last token."""
        return self.answer.seconds[-1]


class Store:
    """The requests of one model, size and number of threads in a folder, a file for each row."""

    def __init__(self, folder: Path, model: Pretrained, job: Job):
        text = json.dumps([model.identity(), job.prompt, job.new, job.threads], default=str)
        self.folder = folder / f"requests-{job.prompt}-{job.new}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"

    def path(self, row: Row) -> Path:
        """The file of a row."""
        return self.folder / f"{hashlib.sha256(str(row).encode()).hexdigest()[:16]}.json"

    def read(self, row: Row) -> dict[str, Request]:
        """The measurements of a row, by the prompt's digest."""
        path = self.path(row)
        if not path.exists():
            return {}
        stored = json.loads(path.read_text("utf-8"))["requests"]
        found = [Request(each["text"], Answer(*map(tuple, each["answer"])), each["load"]) for each in stored]
        return {each.text: each for each in found}

    def add(self, row: Row, request: Request) -> None:
        """Store a request."""
        requests = self.read(row) | {request.text: request}
        stored = {"row": asdict(row), "requests": [each.__dict__ for each in requests.values()]}
        files.make_folder(self.folder)
        files.write(self.path(row), json.dumps(stored, indent=1))

    def forget(self, row: Row) -> None:
        """Remove what is stored of a row."""
        self.path(row).unlink(missing_ok=True)


@dataclass(frozen=True)
class Figures:
    """The figures of a row for a table."""

    row: Row
    first: float
    step: float
    whole: float
    same: tuple[int | None, ...]  # of each turn, how many first tokens are the exact ones; None: all
    load: float


# ---------------------------------------------------------------------- measurement


def digest(item: Sequence[int]) -> str:
    """The hash that identifies a prompt."""
    return hashlib.sha256(np.array(item, np.int64).tobytes()).hexdigest()[:16]


def measure(
    workers: Mapping[str, Worker], store: Store, job: Job, rows: Sequence[Row], items: Sequence[list[int]]
) -> dict[Row, str]:
    """Answer each prompt in each row, unless it is stored already; the reasons of the rows that fail."""
    texts = {digest(item): item for item in items}
    left = {row: [text for text in texts if text not in store.read(row)] for row in rows}
    failed = prepared(workers, job, [row for row in rows if left[row]])
    for number, (text, item) in enumerate(texts.items()):
        running = {str(row): row for row in rows if text in left[row] and row not in failed}
        for name, row in shuffled(running, random.Random(number)).items():
            try:
                _, answer = workers[row.process].ask("run", row, np.array([item]))
            except EngineError as error:
                failed[row] = str(error)
                continue
            request = Request(text, answer, os.getloadavg()[0])
            store.add(row, request)
            times = f"{request.first:.2f} s, {1e3 * request.step:.1f} ms, {request.whole:.2f} s"
            print(f"{job.prompt:,} tokens, turn {number + 1}, {name}: {times}", file=sys.stderr, flush=True)
    return failed


def same_tokens(tokens: Sequence[int], exact: Sequence[int]) -> int | None:
    """The number of first tokens that are the exact ones; None if all are."""
    return next((at for at, (mine, right) in enumerate(zip(tokens, exact, strict=True)) if mine != right), None)


def figures_of(store: Store, rows: Iterable[Row], items: Sequence[list[int]]) -> list[Figures]:
    """The figures of the rows that are stored, over the turns that they have."""
    texts, figures = list(map(digest, items)), []
    exact = store.read(EXACT)
    for row in rows:
        stored = store.read(row)
        requests = [stored[text] for text in texts if text in stored]
        if not requests:
            continue
        same = [
            same_tokens(each.answer.tokens, exact[each.text].answer.tokens) for each in requests if each.text in exact
        ]
        first, step, whole = (
            statistics.median(getattr(each, name) for each in requests) for name in ("first", "step", "whole")
        )
        figures.append(Figures(row, first, step, whole, tuple(same), max(each.load for each in requests)))
    return figures


# ---------------------------------------------------------------------- the sheet


def table(figures: Sequence[Figures], new: int) -> str:
    """A row of Markdown for each engine, weights, method and cache."""
    usual = next((each.whole for each in figures if each.row == USUAL), None)
    lines = [
        [
            each.row.label,
            each.row.weights,
            f"{each.first:,.2f}",
            f"{1e3 * each.step:,.1f}",
            f"{each.whole:,.2f}",
            "–" if usual is None else f"{usual / each.whole:.2f}×",
            ", ".join(f"all {new}" if same is None else str(same) for same in each.same) or "–",
        ]
        for each in figures
    ]
    heads = ["engine", "weights", "first token, s", "later token, ms", "request, s", "speed-up", "same tokens"]
    return sheet.table(heads, lines)


def beside(each: Figures) -> str:
    """A row with its times."""
    return (
        f"{each.row} ({each.whole:,.2f} s: {each.first:,.2f} to the first token, {1e3 * each.step:,.1f} ms each later)"
    )


def conclusion(title: str, figures: Sequence[Figures]) -> str:
    """The fastest rows of subquad and of the others, and in which part subquad is slower."""
    ours = [each for each in figures if each.row.is_ours]
    others = [each for each in figures if not each.row.is_ours]
    if not ours or not others:
        return f"- {title}: the fastest is {beside(min(figures, key=lambda each: each.whole))}."
    mine, other = (min(rows, key=lambda each: each.whole) for rows in (ours, others))
    text = f"- {title}: subquad's fastest is {beside(mine)}, {other.whole / mine.whole:.2f}× as fast as the fastest "
    text += f"other, {beside(other)}."
    for name, unit, scale in (("first", "s", 1), ("step", "ms", 1e3)):
        what = {"first": "The first token", "step": "A later token"}[name]
        best, best_of_ours = (min(rows, key=lambda each: getattr(each, name)) for rows in (others, ours))
        theirs, own = (scale * getattr(each, name) for each in (best, best_of_ours))
        if theirs < own:
            text += f" {what} is soonest in {best.row}: {theirs:,.2f} {unit}, and {own:,.2f} in {best_of_ours.row}."
    return text


def overview(by_title: Sequence[tuple[str, Sequence[Figures]]]) -> str:
    """Whole requests of PyTorch, of the fastest row of each other engine, and of subquad."""
    lines = []
    for title, figures in by_title:

        def fastest(*engines: str, method: str | None = None, rows: Sequence[Figures] = figures) -> Figures | None:
            own = [each for each in rows if each.row.engine in engines and each.row.method == method]
            return min(own, key=lambda each: each.whole, default=None)

        cells = [
            fastest("torch", "compiled", "torchao"),
            fastest("openvino", "openvino-genai"),
            fastest("llama.cpp"),
            *(fastest("subquad", "compiled", "torchao", method=method) for method in METHODS),
        ]
        lines.append([title, *("–" if each is None else f"{each.whole:,.1f} s ({kind(each.row)})" for each in cells)])
    heads = ["prompt + new tokens", "PyTorch", "OpenVINO", "llama.cpp", *(f"subquad `{method}`" for method in METHODS)]
    return sheet.table(heads, lines)


def kind(row: Row) -> str:
    """The weights of a row, with what its column does not say."""
    engine = "GenAI, " if row.engine == "openvino-genai" else ""
    return f"{engine}{row.weights}" + (f", {row.cache} cache" if row.cache else "")


def main(
    model: str = "demo-decoder",
    prompts: tuple[int, ...] = (512, 2048, 8000),
    turns: Annotated[tuple[int, ...], typer.Option(help="for each of --prompts, or one for all")] = (3, 2, 1),
    new_tokens: int = 128,
    engines: tuple[str, ...] = tuple(PACKAGES),
    methods: tuple[str, ...] = METHODS,
    text: Annotated[Path | None, typer.Option(help="a file or folder; default: Python's documentation")] = None,
    keep: Annotated[
        Path | None, typer.Option(help="a folder for models and requests; default: a temporary one")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="measure the rows of --engines again")] = False,
    out: Path | None = None,
) -> None:
    """Measure at every length of the prompt, and print or write the tables."""
    check(engines, PACKAGES, methods)
    counts = turns * len(prompts) if len(turns) == 1 else turns
    if len(counts) != len(prompts):
        raise InputError(f"--turns has {len(turns)} numbers for {len(prompts)} prompts; give as many, or one")
    if not 1 <= min(turns) <= max(turns) <= TEXTS:
        raise InputError(f"--turns must be from 1 to {TEXTS}")
    if new_tokens < 2:
        raise InputError("--new-tokens must be at least 2")
    available, absent = installed(engines, PACKAGES, "request-requirements.txt")
    rows, documents = rows_of(available, methods), documents_of(text)
    decoder = load(model)
    if not decoder.is_causal_lm:
        raise InputError(f"{model} does not generate; give a causal language model")
    passages = read(decoder, documents, min(512, *prompts), 1, 0)
    sections: list[str] = []
    by_title: list[tuple[str, Sequence[Figures]]] = []
    with ExitStack() as stack:
        folder = keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="requests-")))
        files.make_folder(folder)
        stack.enter_context(patch.dict(os.environ, KEPT_MEMORY))
        workers = started((row.process for row in rows), stack, prepare)
        for prompt, count in zip(prompts, counts, strict=True):
            pretrained(model, prompt + new_tokens)  # refuses what its positions do not reach
            items = passages.sequences(decoder, prompt, TEXTS)[:count]
            job = Job(model, prompt, new_tokens, torch.get_num_threads(), folder)
            store = Store(folder, decoder, job)
            for row in rows if fresh else ():
                store.forget(row)
            failed = measure(workers, store, job, rows, items)
            figures = figures_of(store, rows_of(list(PACKAGES), methods), items)
            title = f"{prompt:,} + {new_tokens}"
            sections.append(f"## {title} tokens, {count} turn{'s' * (count > 1)}")
            if figures:
                sections.append(table(figures, new_tokens))
                by_title.append((title, figures))
            if failed:
                sections.append("\n".join(f"- {row}: not measured: {reason}" for row, reason in failed.items()))
            print("\n\n".join(sections[-2:]), file=sys.stderr, flush=True)
    about = ABOUT.format(name=decoder.name, new=new_tokens, threads=torch.get_num_threads())
    publish(about, by_title, [*sections, *absent], out)


def publish(
    about: str, by_title: Sequence[tuple[str, Sequence[Figures]]], sections: Sequence[str], out: Path | None
) -> None:
    """Print the sheet, and write it to a file where one is given."""
    loads = [each.load for _, figures in by_title for each in figures]
    if loads:
        about += f"\nThe machine's load was at most {max(loads):.1f} during a request, this run's included."
    conclusions = "\n".join(conclusion(f"{title} tokens", figures) for title, figures in by_title)
    parts = [about, "## Where each is the fastest", overview(by_title), conclusions, *sections]
    packages = dict.fromkeys(package for engine in PACKAGES.values() for package in engine)
    found: dict[str, Any] = {package: installed_version(package) for package in packages}
    versions = ", ".join(f"{package} {number}" for package, number in found.items() if number is not None)
    parts += [f"Versions: {versions}."] if versions else []
    sheet.publish("Whole requests in several engines", parts, out, "fp32, bf16, fp16, 8 and 4 bits")


if __name__ == "__main__":
    sheet.run(main)
