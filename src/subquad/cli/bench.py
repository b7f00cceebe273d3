"""`subquad bench`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from subquad.cli.common import divided, needs, progress_bar, say, user_errors, working_in
from subquad.cli.options import AsJson, Device, Methods

if TYPE_CHECKING:
    from subquad.report.bench_schema import BenchReport
    from subquad.workflows.bench import Settings


def bench(
    methods: Methods = None,
    lengths: Annotated[str | None, typer.Option(help="Lengths in tokens, divided by commas.")] = None,
    passes: Annotated[
        str | None, typer.Option(help="forward, forward+backward, or both divided by a comma; default: both.")
    ] = None,
    dtypes: Annotated[str, typer.Option(help="float32, bfloat16, float16, float64; divided by commas.")] = "float32",
    device: Device = "cpu",
    batch: Annotated[int, typer.Option(help="Sequences in a call.")] = 1,
    heads: Annotated[int, typer.Option(help="Heads.")] = 6,
    head_dim: Annotated[int, typer.Option(help="Width of a head.")] = 64,
    threads: Annotated[int | None, typer.Option(help="torch's threads; default: as many as it takes itself.")] = None,
    seed: Annotated[int, typer.Option(help="Of the inputs.")] = 0,
    causal: Annotated[
        bool, typer.Option("--causal", help="Causal attention, beside causal SDPA; what cannot is named.")
    ] = False,
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
    as_json: AsJson = False,
) -> None:
    """Time and memory of methods against length, beside SDPA in the same run."""
    with user_errors():
        from subquad.workflows.bench import DEFAULT_METHODS, Settings

        settings = Settings.of(
            lengths=lengths,
            passes=passes,
            quick=quick,
            methods=DEFAULT_METHODS if methods is None else divided(methods),
            dtypes=dtypes,
            device=device,
            batch=batch,
            heads=heads,
            head_dim=head_dim,
            threads=threads,
            seed=seed,
            causal=causal,
            call_limit=call_limit,
        )
        report, paths = _benched(settings, compare, out)
    if as_json:
        print(json.dumps(report, indent=1))
        return
    from subquad.report.bench_tables import rich_table

    console = Console()
    console.print(rich_table(report))
    say(f"Results: {', '.join(map(str, paths))}", console)


def _benched(settings: "Settings", compare: Path | None, out: Path) -> "tuple[BenchReport, list[Path]]":
    """Measure, compare with an earlier run if there is one, and write the files."""
    from subquad.workflows.bench import measure
    from subquad.workflows.bench_old import read_old
    from subquad.workflows.bench_report import report_of
    from subquad.workflows.store import Store

    with needs("report"):
        from subquad.report.bench_changes import changes
        from subquad.report.bench_write import write_bench
    old = None if compare is None else read_old(compare, settings)
    with working_in(out):
        with progress_bar() as progress:
            report = report_of(measure(settings, out, progress))
        if old is not None:
            report["changes"] = changes(old, report, str(compare))
        paths = write_bench(report, out)
        Store.clear(out)
    return report, paths
