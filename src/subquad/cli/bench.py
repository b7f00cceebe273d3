"""`subquad bench`."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from subquad.cli.common import measured, needs, say, show, user_errors
from subquad.cli.options import AsJson, with_options
from subquad.workflows.settings import QUICK, BenchSettings

if TYPE_CHECKING:
    from subquad.report.bench_schema import BenchReport


@with_options(BenchSettings, lambda given: QUICK if given["quick"] else {})
def bench(
    settings: BenchSettings,
    compare: Annotated[
        Path | None, typer.Option(help="The bench.json of an earlier run, to report what changed beyond the noise.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the results; interrupted runs resume from it.")] = Path(
        "subquad-bench"
    ),
    as_json: AsJson = False,
) -> None:
    """Measure time and memory of methods against length, relative to SDPA in the same run."""
    with user_errors():
        from subquad.report.bench_tables import rich_table
        from subquad.workflows.bench import measure
        from subquad.workflows.bench_old import read_old
        from subquad.workflows.bench_plans import resolved
        from subquad.workflows.bench_report import report_of

        with needs("report"):
            from subquad.report.bench_changes import changes
            from subquad.report.write import write_bench
        old = None if compare is None else read_old(compare, resolved(settings))

        def report(progress: Callable[[str, int, int], None]) -> "BenchReport":
            found = report_of(measure(settings, out, progress))
            return found if old is None else {**found, "changes": changes(old, found, str(compare))}

        found, paths = measured(out, report, write_bench)
    if not show(found, rich_table, as_json):
        say(f"Results: {', '.join(map(str, paths))}")
