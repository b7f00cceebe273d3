"""The cost of methods on tasks, not in cosines: retrieval, classification, perplexity, needles.

    python benchmarks/tasks.py --data FOLDER --out benchmarks/results/tasks.md

Every figure has a 95 % bootstrap interval, and every method its paired difference to exact attention in the same model
on the same items. The default of FOLDER is the environment variable SUBQUAD_DATA; its folders gutenberg, state_union
and movie_reviews are read. Each cell of the tables is kept in --cache as soon as it is measured, so that the same
command resumes after an interruption, or after the end of --minutes.
"""

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import sheet
import torch
from task_cells import CONFIDENCE, NOT_MEASURED, RESAMPLES, TaskAtLength, measured, swap_of
from task_decoders import Needle, Perplexity, needle_prompts, novel_passages
from task_retrieval import Retrieval, documents, sources
from task_reviews import Classification, longest_length, longest_reviews

from subquad.core.errors import InputError
from subquad.core.files import cache_folder
from subquad.core.reading import is_folder
from subquad.core.spelling import instead
from subquad.tools.bench.calls import threads
from subquad.tools.cli.progress import progress_bar
from subquad.tools.compare.settings import COMPARED, COMPARED_CAUSAL
from subquad.tools.models.passages import SHORTEST
from subquad.tools.models.pretrained import Pretrained, load
from subquad.tools.runs.jobs import Progress

LENGTHS = {  # of each task, if nothing else is said
    "retrieval": (512, 2048, 4096),
    "classification": (512, 2048),
    "perplexity": (2048, 4096),
    "needle": (2048,),
}
ENCODER_TASKS = ("retrieval", "classification")

ABOUT = f"""\
Brackets are {CONFIDENCE * 100:.0f} % percentile intervals of {RESAMPLES:,} bootstrap resamples.
A difference is the paired one to `exact`, which is the same model with exact attention, on the same items.
If its interval contains 0, no difference was found, and the ends of the interval say how large it may be.
An interval of zero width means that no item changed, not that none can."""


def run(options: argparse.Namespace) -> list[str]:
    """Measure what is not kept yet; the parts of the page.

    Raises:
        InputError: something in the options does not work.
    """
    check(options)
    begin = time.monotonic()
    with progress_bar() as report:
        report("loading", 0, 1)
        tasks = list(prepared(options))
        total, done, parts, missing = sum(len(task.rows) for task in tasks), 0, [ABOUT], 0

        def late() -> bool:
            return options.minutes is not None and time.monotonic() - begin > 60 * options.minutes

        for task in tasks:

            def progress(row: str, task: TaskAtLength = task, before: int = done) -> Progress:
                at = before + list(task.rows).index(row)
                title = f"{task.name}, {task.length:,} tokens, {row}"
                report(title, at, total)
                return lambda what, part, of: report(f"{title}: {what} {part}/{of}", at, total)

            cells = measured(task, options.cache, progress, late)
            done, missing = done + len(task.rows), missing + len(task.rows) - len(cells)
            parts += [heading(task), task.table(cells) if cells else f"{NOT_MEASURED.capitalize()}."]
        if missing:
            report.note(f"{missing} of {total} cells are not measured; the same command resumes")
    return parts


def check(options: argparse.Namespace) -> None:
    """Check all that can be checked before a model is loaded."""
    for name in options.tasks:
        if name not in LENGTHS:
            raise InputError(f"no task {name!r}{instead(name, LENGTHS, '')}")
    if not options.data:
        raise InputError("no data: give --data FOLDER, or set the environment variable SUBQUAD_DATA to it")
    if not is_folder(Path(options.data)):
        raise InputError(f"--data {options.data} is not a folder")
    for name in ("documents", "queries", "prompts"):
        if getattr(options, name) < 1:
            raise InputError(f"--{name} {getattr(options, name)} must be at least 1")
    for length in options.lengths or ():
        if length < 2 * SHORTEST:
            raise InputError(f"--lengths has {length}, but a text needs {2 * SHORTEST} tokens or more")


def prepared(options: argparse.Namespace) -> Iterator[TaskAtLength]:
    """Each task at each of its lengths, the tasks in their order and short texts first."""
    models: dict[bool, Pretrained] = {}
    for name in dict.fromkeys(options.tasks):
        of_encoders = name in ENCODER_TASKS
        if of_encoders not in models:
            models[of_encoders] = model_for(name, options.encoder if of_encoders else options.decoder)
            for method in methods_of(options, of_encoders):
                swap_of(models[of_encoders], method)
        pretrained, methods = models[of_encoders], methods_of(options, of_encoders)
        yield from MAKERS[name](pretrained, methods, options, sorted(set(options.lengths or LENGTHS[name])))


def methods_of(options: argparse.Namespace, of_encoders: bool) -> Sequence[str]:
    """The methods that are asked for, or those that `subquad compare` has in such a model."""
    return tuple(dict.fromkeys(options.methods or (COMPARED if of_encoders else COMPARED_CAUSAL)))


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
    pretrained: Pretrained, methods: Sequence[str], options: argparse.Namespace, lengths: Sequence[int]
) -> Iterator[TaskAtLength]:
    """The task `retrieval` at each length."""
    texts = sources(pretrained, Path(options.data))
    for length in lengths:
        chosen = documents(pretrained, texts, length, options.documents, options.queries, options.seed)
        yield Retrieval(pretrained, methods, length, chosen)


def classification(
    pretrained: Pretrained, methods: Sequence[str], options: argparse.Namespace, lengths: Sequence[int]
) -> Iterator[TaskAtLength]:
    """The task `classification` at each length."""
    reviews = longest_reviews(pretrained, Path(options.data), options.reviews)
    longest = longest_length(pretrained, reviews)
    for length in lengths:
        if length > longest:
            raise InputError(
                f"the longest review has {longest:,} tokens, fewer than {length:,}; give shorter --lengths for the "
                "task classification"
            )
        yield Classification(pretrained, methods, length, reviews)


def perplexity(
    pretrained: Pretrained, methods: Sequence[str], options: argparse.Namespace, lengths: Sequence[int]
) -> Iterator[TaskAtLength]:
    """The task `perplexity` at each length."""
    for length in lengths:
        pretrained.length(length, "--lengths")
        chosen = novel_passages(pretrained, Path(options.data), length, options.tokens)
        yield Perplexity(pretrained, methods, length, chosen)


def needle(
    pretrained: Pretrained, methods: Sequence[str], options: argparse.Namespace, lengths: Sequence[int]
) -> Iterator[TaskAtLength]:
    """The task `needle` at each length."""
    for length in lengths:
        pretrained.length(length, "--lengths")
        prompts = needle_prompts(pretrained, Path(options.data), length, options.prompts, options.seed)
        yield Needle(pretrained, methods, length, prompts)


MAKERS = {"retrieval": retrieval, "classification": classification, "perplexity": perplexity, "needle": needle}


def heading(task: TaskAtLength) -> str:
    """The title of a table, and what it was measured on."""
    return f"## {task.name.capitalize()}, {task.length:,} tokens\n\n{task.about()}"


def listed(text: str) -> list[str]:
    """Values with commas between them."""
    return [part.strip() for part in text.split(",")]


def whole_numbers(text: str) -> list[int]:
    """Whole numbers with commas between them."""
    return list(map(int, listed(text)))


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--tasks", type=listed, default=list(LENGTHS), help=f"of {','.join(LENGTHS)}; default: all")
    made.add_argument("--lengths", type=whole_numbers, help="in tokens, of all tasks; default: each task's own")
    made.add_argument("--methods", nargs="+", help="default: those of subquad compare in such a model")
    made.add_argument("--documents", type=int, default=60, help="of retrieval, at each length")
    made.add_argument("--queries", type=int, default=4, help="of each kind and document")
    made.add_argument("--reviews", type=int, default=160, help="of classification, half of each class")
    made.add_argument("--tokens", type=int, default=8192, help="of the passages of perplexity together, at each length")
    made.add_argument("--prompts", type=int, default=4, help="of each kind of needle, at each length")
    made.add_argument("--encoder", help="hub id or folder; default: the encoder of the demo extra")
    made.add_argument("--decoder", default="demo-decoder", help="hub id or folder; default: demo-decoder")
    made.add_argument("--data", default=os.environ.get("SUBQUAD_DATA", ""), help="default: $SUBQUAD_DATA")
    made.add_argument("--minutes", type=float, help="begin no cell after them; the same command resumes")
    made.add_argument("--cache", type=Path, default=cache_folder() / "tasks", help="folder for measured cells")
    made.add_argument("--seed", type=int, default=0, help="of the choice of documents, queries and facts")
    made.add_argument("--threads", type=int, default=torch.get_num_threads())
    made.add_argument("--out", type=Path)
    return made


def main() -> None:
    """Measure, and print or write the page."""
    options = parser().parse_args()
    try:
        with threads(options.threads):
            parts = run(options)
    except InputError as error:
        raise SystemExit(str(error)) from None
    sheet.publish("Tasks", parts, options.out)


if __name__ == "__main__":
    main()
