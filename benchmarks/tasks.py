"""The cost of methods on tasks, not in cosines: retrieval, classification, perplexity, needles.

    python benchmarks/tasks.py --data FOLDER --out benchmarks/results/tasks.md

Every figure has a 95 % bootstrap interval, and every method its paired difference to exact attention in the same model
on the same items. The default of FOLDER is the environment variable SUBQUAD_DATA; its folders gutenberg, state_union
and movie_reviews are read. Each cell of the tables is kept in --cache as soon as it is measured, so that the same
command resumes after an interruption, or after the end of --minutes.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import sheet
import task_retrieval
import typer
from task_cells import CONFIDENCE, EXACT, NOT_MEASURED, RESAMPLES, TaskAtLength, markdown, measured, swap_of, tables_of
from task_decoders import Needle, Perplexity, needle_prompts, novel_passages
from task_reviews import Classification, longest_length, longest_reviews

from subquad.core.errors import InputError
from subquad.core.files import cache_folder
from subquad.core.reading import is_folder
from subquad.core.spelling import instead
from subquad.tools.cli.progress import progress_bar
from subquad.tools.compare.settings import COMPARED, COMPARED_CAUSAL
from subquad.tools.models.passages import SHORTEST
from subquad.tools.models.pretrained import Pretrained, load
from subquad.tools.runs.jobs import Progress

CACHE = cache_folder() / "tasks"
LENGTHS = {  # of each task, if nothing else is said
    "retrieval": (512, 2048, 4096),
    "classification": (512, 2048),
    "perplexity": (2048, 4096),
    "needle": (2048,),
}
ENCODER_TASKS = ("retrieval", "classification")
Maker = Callable[[Pretrained, Sequence[str], list[int]], Iterator[TaskAtLength]]

ABOUT = f"""\
Brackets are {CONFIDENCE * 100:.0f} % percentile intervals of {RESAMPLES:,} bootstrap resamples.
A difference is the paired one to `exact`, which is the same model with exact attention, on the same items.
If its interval contains 0, no difference was found, and the ends of the interval say how large it may be.
An interval of zero width means that no item changed, not that none can."""


def run(tasks_at_lengths: Iterable[TaskAtLength], cache: Path, minutes: float | None) -> list[dict[str, Any]]:
    """Measure what is not kept yet; a record of each task at each length."""
    begin = time.monotonic()
    with progress_bar() as report:
        report("loading", 0, 1)
        tasks = list(tasks_at_lengths)
        total, done, records, missing = sum(len(task.rows) for task in tasks), 0, [], 0

        def late() -> bool:
            return minutes is not None and time.monotonic() - begin > 60 * minutes

        for task in tasks:

            def progress(row: str, task: TaskAtLength = task, before: int = done) -> Progress:
                at = before + list(task.rows).index(row)
                title = f"{task.name}, {task.length:,} tokens, {row}"
                report(title, at, total)
                return lambda what, part, of: report(f"{title}: {what} {part}/{of}", at, total)

            cells = measured(task, cache, progress, late)
            done, missing = done + len(task.rows), missing + len(task.rows) - len(cells)
            tables = tables_of(task, cells) if EXACT in cells else {}
            records.append({"task": task.name, "length": task.length, "about": task.about(), "tables": tables})
        if missing:
            report.note(f"{missing} of {total} cells are not measured; the same command resumes")
    return records


def check(tasks: Iterable[str], data: str, lengths: Iterable[int], **counts: int) -> None:
    """Check all that can be checked before a model is loaded."""
    for name in tasks:
        if name not in LENGTHS:
            raise InputError(f"no task {name!r}{instead(name, LENGTHS, '')}")
    if not data:
        raise InputError("no data: give --data FOLDER, or set the environment variable SUBQUAD_DATA to it")
    if not is_folder(Path(data)):
        raise InputError(f"--data {data} is not a folder")
    for name, count in counts.items():
        if count < 1:
            raise InputError(f"--{name} {count} must be at least 1")
    for length in lengths:
        if length < 2 * SHORTEST:
            raise InputError(f"--lengths has {length}, but a text needs {2 * SHORTEST} tokens or more")


def prepared(
    makers: Mapping[str, Maker], lengths: Sequence[int], methods: Sequence[str], encoder: str | None, decoder: str
) -> Iterator[TaskAtLength]:
    """Each task at each of its lengths, the tasks in their order and short texts first."""
    models: dict[bool, Pretrained] = {}
    for name, make in makers.items():
        of_encoders = name in ENCODER_TASKS
        chosen = tuple(dict.fromkeys(methods or (COMPARED if of_encoders else COMPARED_CAUSAL)))
        if of_encoders not in models:
            models[of_encoders] = model_for(name, encoder if of_encoders else decoder)
            for method in chosen:
                swap_of(models[of_encoders], method)
        yield from make(models[of_encoders], chosen, sorted(set(lengths or LENGTHS[name])))


def model_for(task: str, name: str | None) -> Pretrained:
    """The model of a task; InputError if it is of another kind."""
    pretrained = load(name)
    wanted = "embedding" if task in ENCODER_TASKS else "causal-lm"
    if pretrained.kind != wanted:
        needs, option = {
            "embedding": ("an encoder that gives embeddings", "--encoder"),
            "causal-lm": ("a causal language model, such as demo-decoder", "--decoder"),
        }[wanted]
        raise InputError(
            f"{pretrained.name} is of the kind {pretrained.kind}, but the task {task} needs {needs}; give one as "
            f"{option}"
        )
    return pretrained


def retrieval(
    data: Path, count: int, queries: int, seed: int, pretrained: Pretrained, methods: Sequence[str], lengths: list[int]
) -> Iterator[TaskAtLength]:
    """The task `retrieval` at each length."""
    texts = task_retrieval.sources(pretrained, data)
    for length in lengths:
        chosen = task_retrieval.documents(pretrained, texts, length, count, queries, seed)
        yield task_retrieval.Retrieval(pretrained, methods, length, chosen)


def classification(
    data: Path, count: int, pretrained: Pretrained, methods: Sequence[str], lengths: list[int]
) -> Iterator[TaskAtLength]:
    """The task `classification` at each length."""
    reviews = longest_reviews(pretrained, data, count)
    longest = longest_length(pretrained, reviews)
    for length in lengths:
        if length > longest:
            raise InputError(
                f"the longest review has {longest:,} tokens, fewer than {length:,}; give shorter --lengths for the "
                "task classification"
            )
        yield Classification(pretrained, methods, length, reviews)


def perplexity(
    data: Path, tokens: int, pretrained: Pretrained, methods: Sequence[str], lengths: list[int]
) -> Iterator[TaskAtLength]:
    """The task `perplexity` at each length."""
    for length in lengths:
        pretrained.length(length, "--lengths")
        yield Perplexity(pretrained, methods, length, novel_passages(pretrained, data, length, tokens))


def needle(
    data: Path, count: int, seed: int, pretrained: Pretrained, methods: Sequence[str], lengths: list[int]
) -> Iterator[TaskAtLength]:
    """The task `needle` at each length."""
    for length in lengths:
        pretrained.length(length, "--lengths")
        yield Needle(pretrained, methods, length, needle_prompts(pretrained, data, length, count, seed))


def section(record: Mapping[str, Any]) -> str:
    """The part of the page with the tables of a record, and what they were measured on."""
    tables = markdown(record["tables"]) or f"{NOT_MEASURED.capitalize()}."
    return f"## {record['task'].capitalize()}, {record['length']:,} tokens\n\n{record['about']}\n\n{tables}"


def main(
    tasks: tuple[str, ...] = tuple(LENGTHS),
    lengths: Annotated[tuple[int, ...], typer.Option(help="in tokens, of all tasks; default: each task's own")] = (),
    methods: Annotated[tuple[str, ...], typer.Option(help="default: those of subquad compare in such a model")] = (),
    documents: Annotated[int, typer.Option(help="of retrieval, at each length")] = 60,
    queries: Annotated[int, typer.Option(help="of each kind and document")] = 4,
    reviews: Annotated[int, typer.Option(help="of classification, half of each class")] = 160,
    tokens: Annotated[int, typer.Option(help="of the passages of perplexity together, at each length")] = 8192,
    prompts: Annotated[int, typer.Option(help="of each kind of needle, at each length")] = 4,
    encoder: Annotated[str | None, typer.Option(help="hub id or folder; default: that of the demo extra")] = None,
    decoder: Annotated[str, typer.Option(help="hub id or folder")] = "demo-decoder",
    data: Annotated[str, typer.Option(envvar="SUBQUAD_DATA")] = "",
    minutes: Annotated[float | None, typer.Option(help="begin no cell after them; the same command resumes")] = None,
    cache: Annotated[Path, typer.Option(help="folder for measured cells")] = CACHE,
    seed: Annotated[int, typer.Option(help="of the choice of documents, queries and facts")] = 0,
    out: Path | None = None,
) -> None:
    """Measure, and print or write the page."""
    check(tasks, data, lengths, documents=documents, queries=queries, prompts=prompts)
    makers = {
        "retrieval": partial(retrieval, Path(data), documents, queries, seed),
        "classification": partial(classification, Path(data), reviews),
        "perplexity": partial(perplexity, Path(data), tokens),
        "needle": partial(needle, Path(data), prompts, seed),
    }
    chosen = {name: makers[name] for name in tasks}
    records = run(prepared(chosen, lengths, methods, encoder, decoder), cache, minutes)
    sheet.publish("Tasks", [ABOUT, *map(section, records)], out, records=records)


if __name__ == "__main__":
    sheet.run(main)
