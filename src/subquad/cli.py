"""The command line: parse, call, print. Mistakes of the user end in one line and exit code 2."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from subquad.methods import METHODS, Traits

if TYPE_CHECKING:
    from subquad.report.bench_schema import BenchReport
    from subquad.workflows.bench import Settings

app = typer.Typer(
    help="Transformer attention for less than N², with an honest account of what it costs in quality.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
errors = Console(stderr=True)


def main() -> None:
    """Run the command line."""
    app()


@contextmanager
def _user_errors() -> Iterator[None]:
    """One line and exit code 2 for what the user can mend; 130 for an interruption."""
    from subquad.workflows.errors import InputError

    try:
        yield
    except InputError as error:
        errors.print(f"[bold red]error:[/] {_escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        errors.print("interrupted; the same command goes on from here")
        raise typer.Exit(130) from None


@app.command()
def compare(
    model: Annotated[
        str | None, typer.Argument(help="Hub id or folder; default: the encoder of the demo extra.")
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(help="Text to read: file, folder, .jsonl, .csv; repeatable. Default: Python's own documentation."),
    ] = None,
    column: Annotated[
        str, typer.Option(help="The column of .jsonl, .csv and .tsv files that holds the text.")
    ] = "text",
    task: Annotated[
        str | None, typer.Option(help="A labelled task too: banking77, movie-reviews, sts or retrieval.")
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(envvar="SUBQUAD_DATA", help="Where the task's data is.")] = None,
    examples: Annotated[
        int | None, typer.Option(help="Use so many of the task's examples, drawn by lot; default: all.")
    ] = None,
    methods: Annotated[
        list[str] | None,
        typer.Option(help='Methods as "name:setting=value,…"; repeatable, or several divided by spaces.'),
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(help="The model's own length in tokens; default: its positions, at most 512.")
    ] = None,
    min_fidelity: Annotated[
        float, typer.Option(help="Recommend nothing below this mean cosine (or ratio of perplexities) to exact.")
    ] = 0.99,
    device: Annotated[str, typer.Option(help="Where to run: cpu, cuda, cuda:1.")] = "cpu",
    out: Annotated[Path, typer.Option(help="Folder for the report; interrupted runs resume from it.")] = Path(
        "subquad-compare"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON and nothing else.")] = False,
) -> None:
    """Which attention can go into this model, what does that lose, what does it gain?"""
    from subquad.workflows.errors import InputError

    with _user_errors():
        try:
            from subquad.report.tables import rich_table
            from subquad.report.write import write_report
            from subquad.workflows.compare import DEFAULT_METHODS, Settings, measure
            from subquad.workflows.compare_report import report_of
            from subquad.workflows.store import Store
        except ImportError as error:
            raise InputError(f"{error.name} is not installed: pip install 'subquad[demo]'") from None
        settings = Settings(
            model=model,
            text=tuple(text or ()),
            column=column,
            task=task,
            data_dir=data_dir,
            examples=examples,
            methods=DEFAULT_METHODS if methods is None else _divided(methods),
            max_length=max_length,
            min_fidelity=min_fidelity,
            device=device,
        )
        _check_folder(out)
        with _progress() as progress:
            report = report_of(measure(settings, out, progress))
        with _writing(out):
            paths = write_report(report, out)
        Store.clear(out)
    if as_json:
        print(json.dumps(report, indent=1))
        return
    console = Console()
    console.print(rich_table(report))
    console.print(f"Report: {next(path for path in paths if path.suffix == '.html')}", soft_wrap=True)


@app.command()
def bench(
    methods: Annotated[
        list[str] | None,
        typer.Option(help='Methods as "name:setting=value,…"; repeatable, or several divided by spaces.'),
    ] = None,
    lengths: Annotated[str | None, typer.Option(help="Lengths in tokens, divided by commas.")] = None,
    passes: Annotated[
        str | None, typer.Option(help="forward, forward+backward, or both divided by a comma; default: both.")
    ] = None,
    dtypes: Annotated[str, typer.Option(help="float32, bfloat16, float16, float64; divided by commas.")] = "float32",
    device: Annotated[str, typer.Option(help="Where to run: cpu, cuda, cuda:1.")] = "cpu",
    batch: Annotated[int, typer.Option(help="Sequences in a call.")] = 1,
    heads: Annotated[int, typer.Option(help="Heads.")] = 6,
    head_dim: Annotated[int, typer.Option(help="Width of a head.")] = 64,
    threads: Annotated[int | None, typer.Option(help="torch's threads; default: as many as it takes itself.")] = None,
    seed: Annotated[int, typer.Option(help="Of the inputs.")] = 0,
    call_limit: Annotated[
        float, typer.Option(help="Seconds; a call that is predicted to take longer is not run.")
    ] = 10.0,
    quick: Annotated[bool, typer.Option("--quick", help="Three lengths, forward, few rounds, no memory.")] = False,
    compare: Annotated[
        Path | None, typer.Option(help="The bench.json of an earlier run: say what changed beyond the noise.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the results; interrupted runs resume from it.")] = Path(
        "subquad-bench"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON and nothing else.")] = False,
) -> None:
    """Time and memory of methods against length, beside SDPA in the same run."""
    with _user_errors():
        from subquad.workflows.bench import DEFAULT_METHODS, Settings

        settings = Settings.of(
            lengths=lengths,
            passes=passes,
            quick=quick,
            methods=DEFAULT_METHODS if methods is None else _divided(methods),
            dtypes=dtypes,
            device=device,
            batch=batch,
            heads=heads,
            head_dim=head_dim,
            threads=threads,
            seed=seed,
            call_limit=call_limit,
        )
        report, paths = _benched(settings, compare, out)
    if as_json:
        print(json.dumps(report, indent=1))
        return
    from subquad.report.bench_tables import rich_table

    console = Console()
    console.print(rich_table(report))
    console.print(f"Results: {', '.join(map(str, paths))}", soft_wrap=True)


def _benched(settings: "Settings", compare: Path | None, out: Path) -> "tuple[BenchReport, list[Path]]":
    """Measure, compare with an earlier run if there is one, and write the files."""
    from subquad.workflows.bench import measure
    from subquad.workflows.bench_old import read_old
    from subquad.workflows.bench_report import report_of
    from subquad.workflows.errors import InputError
    from subquad.workflows.store import Store

    try:
        from subquad.report.bench_changes import changes
        from subquad.report.bench_write import write_bench
    except ImportError as error:
        raise InputError(f"{error.name} is not installed: pip install 'subquad[report]'") from None
    old = None if compare is None else read_old(compare, settings)
    _check_folder(out)
    with _progress() as progress:
        report = report_of(measure(settings, out, progress))
    if old is not None:
        report["changes"] = changes(old, report, str(compare))
    with _writing(out):
        paths = write_bench(report, out)
    Store.clear(out)
    return report, paths


def _divided(given: list[str]) -> tuple[str, ...]:
    """A repeatable option whose values may hold several, divided by spaces."""
    return tuple(part for one in given for part in one.split())


def _check_folder(out: Path) -> None:
    from subquad.workflows.errors import InputError

    if out.exists() and not out.is_dir():
        raise InputError(f"--out {out} is a file; give a folder")


@contextmanager
def _writing(out: Path) -> Iterator[None]:
    from subquad.workflows.errors import InputError

    try:
        yield
    except OSError as error:
        raise InputError(f"cannot write the report to {out}: {error.strerror}") from None


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """What a long run tells of itself, on the standard error: a bar, or lines where it is no terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:<42}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=errors, transient=True) as bar:
        shown = bar.add_task("loading")

        def progress(what: str, done: int, total: int) -> None:
            bar.update(shown, description=what, completed=done, total=total)
            if not errors.is_terminal and total > 1 and (done % 10 == 0 or done == total):
                print(f"{done}/{total} {what}", file=sys.stderr, flush=True)

        yield progress


@app.command()
def methods(
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """The methods and what each can do."""
    if as_json:
        print(json.dumps({name: _traits(name) for name in METHODS}, indent=1, default=str))
        return
    console = Console()
    for name, cls in METHODS.items():
        able, unable = _abilities(cls.traits)
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 2))
        table.add_row("settings", ", ".join(f"{k}={v}" for k, v in cls().to_dict().items() if k != "name") or "none")
        table.add_row("supports", ", ".join(able))
        table.add_row("refuses", ", ".join(unable) or "nothing")
        table.add_row("cost", cls.traits.complexity)
        table.add_row("source", cls.traits.source)
        console.print(f"[bold]{name}[/]")
        console.print(table)


@app.command()
def doctor() -> None:
    """Versions, backends, what is fast here and why not."""
    from subquad.workflows import machine

    table = Table(box=None, show_header=False)
    for what, found in (machine.versions() | machine.hardware() | machine.backends()).items():
        table.add_row(what, _escape(found))
    Console().print(table)


def _traits(name: str) -> dict[str, Any]:
    cls = METHODS[name]
    return {"settings": cls().to_dict(), **{k: v for k, v in vars(cls.traits).items() if k != "example"}}


def _abilities(traits: Traits) -> tuple[list[str], list[str]]:
    """What a method supports and what it refuses, in words."""
    words = {
        "causal masks": traits.causal == "strict",
        "cross-attention": traits.cross,
        "padding": traits.key_padding,
        "segments": traits.segments,
        "windows": traits.window,
        "dense masks": traits.dense_mask,
        "bias": traits.bias,
        "grouped-query heads": traits.gqa,
    }
    return [word for word, can in words.items() if can], [word for word, can in words.items() if not can]


def _escape(text: str) -> str:
    return text.replace("[", r"\[")
