"""Whole models in PyTorch, other engines and with subquad's methods: time and fidelity, on the same texts.

    python benchmarks/engines.py --threads 2 --out benchmarks/results/engines.md
    python benchmarks/engines.py --engines "torch subquad openvino" --models encoder --lengths 512 --turns 3

Models are "encoder" (the `demo` extra), "demo-decoder", hub ids or folders. Encoders are
measured at `--lengths`, decoders over whole prompts of `--prompts` tokens; beyond a model's own positions,
`sq.hf.extend_positions` stretches learned ones and extends rotary ones by YaRN. An engine that is not installed is
named with the command that installs it, and the others are measured; PyTorch in fp32 always is, because everything is
compared with it. `--keep FOLDER` keeps the converted models for the next run.
"""

import math
import random
import re
import statistics
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import numpy as np
import sheet
import torch
import typer
from engine_models import ENCODER, Outputs, pretrained
from engine_runs import check, documents_of, installed, prepared, started
from engine_sparse import SPARSE
from engine_workers import FLASH, NO_FLASH, PACKAGES, EngineError, Job, Row, Worker

from subquad.core.errors import InputError
from subquad.core.versions import cpu_capabilities
from subquad.tools.measure.fidelity import cosine
from subquad.tools.measure.timing import shuffled, speedup, spread
from subquad.tools.models.next_tokens import NextTokens, Prefill, differences, next_of, summed
from subquad.tools.models.passages import read
from subquad.tools.models.pretrained import Pretrained, load
from subquad.tools.runs.floor import MAX_KL, MIN_FIDELITY

TABLE = re.compile(r"(?<=<!-- table:begin -->\n).*?(?=\n<!-- table:end -->)", re.DOTALL)
METHODS = ("full:kernel=subquad", "clustered-tail", "clustered-tail:clusters=64,topk=96")
EXACT = Row("torch", "fp32")
NOT_FINITE = "its outputs are not finite"
POSITIONS = 512  # of a prompt whose next tokens are compared, evenly spread

ABOUT = """\
Whole models, one item without padding, {threads} threads: an encoder's embedding, or a decoder's prefill with the \
logits of the last token.
Every engine has a process of its own and all get the same token ids.
In every turn each row runs once, in a new order, while the other processes wait; each turn has a text of its own.
One turn before them warms up.
Times are medians with quartiles; the speed-up is the median of the ratios to PyTorch in fp32 within a turn.
Fidelity is that to exact attention in PyTorch in fp32, over {texts}: the mean cosine of embeddings, or the KL \
divergence of next-token distributions in nats and the share of positions with the same most likely token \
({positions} positions of each prompt, the head of the fp32 model on each row's last hidden states).
OpenVINO and ONNX Runtime run the model converted for this one length.
OpenVINO's int8 weights are those of `nncf.compress_weights`, computed with bf16 on processors that have it; ONNX \
Runtime's int8 is `quantize_dynamic` with a scale for each channel, which also rounds the inputs of products.
XAttention is OpenVINO's sparse prefill of decoders, with blocks of 64 and a stride of 8, from the package `openvino` \
alone.
FlexAttention is that of transformers, which compiles the attention and leaves the rest of the model as it is; \
zentorch compiles the whole model.
llama.cpp is built for this processor and keeps the keys and values in fp16, as by default; its 4 bits are the weights \
of its file, which the other rows hold converted to fp32 or bf16."""


@dataclass(frozen=True)
class Figures:
    """The measurements of a row."""

    row: Row
    ms: tuple[float, float, float]  # quartiles, the median in the middle
    speedup: float  # over PyTorch in fp32
    fidelity: Mapping[str, str]  # by the head of its column

    @property
    def summary(self) -> str:
        """The fidelity in one line."""
        return ", ".join(f"{name} {text}" for name, text in self.fidelity.items())


def rows_of(engines: Iterable[str], methods: Sequence[str], causal: bool, formats: Sequence[str] = ()) -> list[Row]:
    """The rows of some engines, in some number formats or in all, PyTorch in fp32 first.

    Sparse prefill and llama.cpp are for decoders alone.

    Raises:
        InputError: no row has one of these formats.
    """
    both = ("fp32", "bf16")
    processor = cpu_capabilities()
    fastest = "bf16" if processor.get("avx512_bf16") or processor.get("amx_bf16") else "fp32"
    sparse = [Row("xattention", fastest, method) for method in SPARSE]
    weights = ("bf16", "fp16", "Q4_1 (4 bits)")
    llama = [Row("llama.cpp", numbers, attention) for numbers in weights for attention in (FLASH, NO_FLASH)]
    rows: dict[str, list[Row]] = {
        "torch": [Row("torch", "bf16")],
        "flexattention": [Row("flexattention", numbers) for numbers in both],
        "subquad": [Row("subquad", numbers, method) for method in methods for numbers in both],
        "zentorch": [Row("zentorch", numbers) for numbers in both],
        "openvino": [Row("openvino", numbers) for numbers in (*both, "int8 weights")],
        "xattention": sparse if causal else [],
        "onnxruntime": [Row("onnxruntime", numbers) for numbers in ("fp32", "int8 dynamic")],
        "llama.cpp": llama if causal else [],
    }
    chosen = [row for engine in engines for row in rows[engine]]
    available = dict.fromkeys(row.numbers.partition(" ")[0] for row in (EXACT, *chosen))
    if unknown := [each for each in formats if each not in available]:
        raise InputError(f"no row has the number format {unknown[0]}; there are {', '.join(available)}")
    return [EXACT, *(row for row in chosen if not formats or row.numbers.partition(" ")[0] in formats)]


# ---------------------------------------------------------------------- measurement


def turn(
    workers: Mapping[str, Worker], rows: Sequence[Row], ids: np.ndarray, seed: int
) -> tuple[dict[Row, tuple[float, Outputs]], dict[Row, str]]:
    """Seconds and outputs of each row on one text, in an order of its own; the reasons of those that fail.

    A row whose outputs are not finite fails too: a time of wrong outputs means nothing.
    """
    results, failed = {}, {}
    for name, row in shuffled({str(row): row for row in rows}, random.Random(seed)).items():
        print(f"  {name}", file=sys.stderr, flush=True)
        try:
            seconds, outputs = workers[row.process].ask("run", row, ids)
        except EngineError as error:
            failed[row] = str(error)
            continue
        if all(np.isfinite(out).all() for out in outputs):
            results[row] = seconds, outputs
        else:
            failed[row] = NOT_FINITE
    return results, failed


def cosines(outputs: Mapping[Row, Outputs]) -> dict[Row, float]:
    """The cosine of each row's embedding to the exact one."""
    exact = torch.from_numpy(outputs[EXACT][0])
    return {row: float(cosine(torch.from_numpy(out[0]), exact).mean()) for row, out in outputs.items()}


def next_tokens(model: Pretrained, item: list[int], outputs: Mapping[Row, Outputs]) -> dict[Row, NextTokens]:
    """The next tokens of each row against the exact ones, at some positions."""
    step = -(-len(item) // POSITIONS)
    head = model.prefill([item[:1]]).head
    assert head is not None
    runs = {str(row): Prefill(torch.from_numpy(out[0]), head).every(step) for row, out in outputs.items()}
    tokens, counted = (x[:, (len(item) - 1) % step :: step] for x in next_of(model.batch([item])))
    compared = differences(runs, str(EXACT), tokens, counted)
    return {row: compared[str(row)] for row in outputs}


def fidelities(
    model: Pretrained, texts: Sequence[tuple[list[int], Mapping[Row, Outputs]]]
) -> dict[Row, dict[str, str]]:
    """The fidelity of each row for a table, over some texts with their outputs."""
    if not model.is_causal_lm:
        each = [cosines(outputs) for _, outputs in texts]
        return {row: {"cosine": f"{statistics.fmean(of_text[row] for of_text in each):.4f}"} for row in each[0]}
    sums = [next_tokens(model, item, outputs) for item, outputs in texts]
    totals = {row: summed([of_text[row] for of_text in sums]) for row in sums[0]}
    return {
        row: {"KL": f"{total.mean_kl:.5f}", "same top token": f"{total.agreement:.4f}"} for row, total in totals.items()
    }


def measured(
    workers: Mapping[str, Worker], model: Pretrained, job: Job, rows: Sequence[Row], items: Sequence[list[int]]
) -> tuple[list[Figures], dict[Row, str]]:
    """Figures of the rows that run, and the reasons of the others; the first item warms up."""
    failed = prepared(workers, job, rows)
    turns: list[dict[Row, tuple[float, Outputs]]] = []
    for number, item in enumerate(items):
        if EXACT in failed:
            raise SystemExit(f"{EXACT} is what everything is compared with, and fails: {failed[EXACT]}")
        print(f"{job.model}, {job.length:,} tokens, turn {number} of {len(items) - 1}", file=sys.stderr, flush=True)
        results, failures = turn(workers, [row for row in rows if row not in failed], np.array([item]), number)
        failed |= failures
        turns.append(results)
    running = [row for row in rows if row not in failed]
    texts = [(item, {row: results[row][1] for row in running}) for item, results in zip(items, turns, strict=True)]
    fidelity = fidelities(model, texts)
    seconds = {row: [results[row][0] for results in turns[1:]] for row in running}
    figures = []
    for row in running:
        times = spread([1e3 * each for each in seconds[row]])
        speed = speedup(seconds[row], seconds[EXACT])
        figures.append(Figures(row, (times.low, times.median, times.high), speed, fidelity[row]))
    return figures, failed


# ---------------------------------------------------------------------- the sheet


def table(figures: Sequence[Figures]) -> str:
    """A row of Markdown for each engine, number format and method."""
    heads = list(figures[0].fidelity)
    lines = [
        [
            each.row.label,
            each.row.numbers,
            f"{each.ms[1]:,.1f} ({each.ms[0]:,.1f}–{each.ms[2]:,.1f})",
            f"{each.speedup:.2f}×",
            *each.fidelity.values(),
        ]
        for each in figures
    ]
    return sheet.table(["engine", "numbers", "ms (quartiles)", "speed-up", *heads], lines)


def winners(title: str, figures: Sequence[Figures]) -> str:
    """The fastest row with exact attention, the fastest of all, and subquad's fastest approximation."""
    exact = min((each for each in figures if each.row.is_exact), key=lambda each: each.ms[1])
    fastest = min(figures, key=lambda each: each.ms[1])
    approximate = [each for each in figures if each.row.engine == "subquad" and not each.row.is_exact]
    text = f"- {title}: with exact attention, {exact.row} is the fastest ({exact.ms[1]:,.0f} ms, {exact.summary})."
    if fastest is exact:
        text += " It is also the fastest of all rows."
    else:
        text += f" The fastest of all rows is {beside(fastest, exact)}."
    if approximate:
        ours = min(approximate, key=lambda each: each.ms[1])
        if ours is not fastest:
            text += f" The fastest approximation of subquad is {beside(ours, exact)}."
    return text


def best_of_subquad(figures: Sequence[Figures]) -> Figures | None:
    """The fastest row of subquad that keeps the default floor of `subquad compare`."""

    def keeps(each: Figures) -> bool:
        if "KL" in each.fidelity:
            return float(each.fidelity["KL"]) <= MAX_KL
        return float(each.fidelity["cosine"]) >= MIN_FIDELITY

    rows = [each for each in figures if each.row.engine == "subquad" and keeps(each)]
    return min(rows, key=lambda each: each.ms[1], default=None)


def overview(measured: Sequence[tuple[str, Sequence[Figures]]]) -> str:
    """The table of the results: PyTorch, the fastest other engine with exact attention, and subquad's best row."""
    lines = []
    for title, figures in measured:
        exact, bf16 = (next((f for f in figures if f.row == Row("torch", n)), None) for n in ("fp32", "bf16"))
        others = [each for each in figures if each.row.engine not in ("torch", "subquad") and each.row.is_exact]
        other, ours = min(others, key=lambda each: each.ms[1], default=None), best_of_subquad(figures)
        fastest = min((each.ms[1] for each in (exact, bf16, other) if each is not None), default=math.inf)
        lines.append([
            title,
            *("–" if each is None else f"{each.ms[1]:,.0f} ms" for each in (exact, bf16)),
            "–" if other is None else f"{other.ms[1]:,.0f} ms ({other.row.label}, {other.row.numbers})",
            "–" if ours is None else f"**{ours.ms[1]:,.0f} ms** (`{ours.row.method}`, {ours.row.numbers})",
            "–" if ours is None else ", ".join(f"{name} {text}" for name, text in list(ours.fidelity.items())[:1]),
            "–" if ours is None else f"{fastest / ours.ms[1]:.2f}×",
        ])  # fmt: skip
    heads = ["model, tokens", "PyTorch fp32", "PyTorch bf16", "fastest other engine", "subquad", "fidelity"]
    return sheet.table([*heads, "speed-up over the fastest other"], lines)


def publish(page: Path, made: str) -> None:
    """Put the table between the marks of a page."""
    page.write_text(TABLE.sub(lambda _: made, page.read_text("utf-8")), "utf-8")


def beside(each: Figures, exact: Figures) -> str:
    """A row with its speed next to that of the fastest exact one."""
    ratio = exact.ms[1] / each.ms[1]
    overlap = each.ms[0] <= exact.ms[2] and exact.ms[0] <= each.ms[2]
    noise = "; the quartiles of the two overlap" if overlap else ""
    return f"{each.row} ({each.ms[1]:,.0f} ms, {ratio:.2f}× as fast as that{noise}; {each.summary})"


def versions_of(engines: Iterable[str]) -> str:
    """The packages of the engines, with their versions."""
    packages = dict.fromkeys(package for engine in engines for package in PACKAGES[engine])
    return ", ".join(f"{package} {version(package)}" for package in packages)


def title_of(model: Pretrained, length: int, own_limit: int | None) -> str:
    """The heading of a table."""
    how = ""
    if own_limit is not None and length > own_limit:
        how = "extended by YaRN" if model.is_rotary else "stretched"
        how = f", positions {how} from {own_limit:,} by `sq.hf.extend_positions`"
    return f"{model.name}, {length:,} tokens{how}"


def main(
    lengths: tuple[int, ...] = (512, 2048, 4096),
    prompts: tuple[int, ...] = (2048, 4096),
    models: tuple[str, ...] = (ENCODER, "demo-decoder"),
    engines: tuple[str, ...] = tuple(PACKAGES),
    methods: tuple[str, ...] = METHODS,
    numbers: Annotated[
        tuple[str, ...], typer.Option(help='the rows in these formats, such as "fp32 int8"; default: all')
    ] = (),
    turns: int = 5,
    prompt_turns: Annotated[int, typer.Option(help="turns of decoders, which take seconds each")] = 2,
    text: Annotated[Path | None, typer.Option(help="a file or folder; default: Python's documentation")] = None,
    page: Annotated[Path | None, typer.Option(help="a file that gets the table of the fastest rows, too")] = None,
    keep: Annotated[Path | None, typer.Option(help="a folder for converted models; default: a temporary one")] = None,
    out: Path | None = None,
) -> None:
    """Measure every model at every length, and print or write the tables."""
    check(engines, PACKAGES, methods)
    if min(turns, prompt_turns) < 1:
        raise InputError("--turns and --prompt-turns must be at least 1")
    available, absent = installed(engines, PACKAGES, "engines-requirements.txt")
    documents = documents_of(text)
    formats: dict[str, None] = {}
    sections, conclusions, rows_by_title = [], [], []
    with ExitStack() as stack:
        folder = keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="engines-")))
        workers = started((Row(engine, EXACT.numbers).process for engine in (EXACT.engine, *available)), stack)
        for name in models:
            own = load(None if name == ENCODER else name)
            sizes, count = (prompts, prompt_turns) if own.is_causal_lm else (lengths, turns)
            passages = read(own, documents, min(512, *sizes), 1, 0)
            rows = rows_of(available, methods, own.is_causal_lm, numbers)
            for length in sizes:
                model = pretrained(name, length)
                items = passages.sequences(model, length, count + 1)
                job = Job(name, length, torch.get_num_threads(), folder)
                figures, failed = measured(workers, model, job, rows, items)
                title = title_of(model, length, own.limit)
                formats |= dict.fromkeys(each.row.numbers for each in figures)
                sections += [f"## {title}", table(figures)]
                if failed:
                    sections.append("\n".join(f"- {row}: not measured: {reason}" for row, reason in failed.items()))
                conclusions.append(winners(title, figures))
                if own.limit is None or length <= own.limit:  # stretched positions show the speed of attention only
                    rows_by_title.append((title, figures))
                print("\n\n".join(sections[-2:]), file=sys.stderr, flush=True)
    if page is not None:
        decoders_first = sorted(rows_by_title, key=lambda each: "KL" not in each[1][0].fidelity)
        publish(page, overview(decoders_first))
    texts = f"{turns + 1} texts of an encoder and {prompt_turns + 1} prompts of a decoder"
    about = ABOUT.format(threads=torch.get_num_threads(), texts=texts, positions=POSITIONS)
    parts = [about, "## Where each is the fastest", "\n".join(conclusions), *sections]
    parts += [f"- {line}" for line in absent]
    packages = versions_of(available)
    parts += [f"Versions: {packages}."] if packages else []
    sheet.publish("Whole models in several engines", parts, out, ", ".join(formats))


if __name__ == "__main__":
    sheet.run(main)
