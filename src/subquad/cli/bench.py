"""`subquad bench`."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from subquad.cli.common import measured, needs, show, user_errors
from subquad.cli.options import Again, AsJson, with_options
from subquad.cli.output import say
from subquad.workflows.settings import QUICK, BenchSettings


@with_options(BenchSettings, lambda given: QUICK if given["quick"] else {})
def bench(
    settings: BenchSettings,
    compare: Annotated[
        Path | None, typer.Option(help="The bench.json of an earlier run, to report what changed beyond the noise.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the results; interrupted runs resume from it.")] = Path(
        "subquad-bench"
    ),
    again: Again = False,
    as_json: AsJson = False,
) -> None:
    """Measure time and memory of methods against length, relative to SDPA in the same run."""
    with user_errors():
        from subquad.report.kinds import BENCH
        from subquad.workflows.bench import check, measure
        from subquad.workflows.bench_old import read_old
        from subquad.workflows.bench_plans import resolved
        from subquad.workflows.bench_report import report_of
        from subquad.workflows.finished import Claim

        with needs("report"):
            from subquad.report.bench_changes import changes
            from subquad.report.write import write_bench
        old = None if compare is None else read_old(compare, resolved(settings))

        def beside_old(report: Any) -> Any:
            return report if old is None else {**report, "changes": changes(old, report, str(compare))}

        def report(progress: Any) -> Any:
            return report_of(measure(settings, out, progress))

        found = measured(Claim(BENCH, settings, out), partial(check, settings), report, write_bench, again, beside_old)
        if not show(found, lambda: BENCH.table(found), as_json):
            say(f"Results: {out / BENCH.file}, {out / BENCH.page}, and the plots beside them")
