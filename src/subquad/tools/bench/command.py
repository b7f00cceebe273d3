"""`subquad bench`."""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from subquad.tools.bench.settings import QUICK, STEPPED, BenchSettings
from subquad.tools.cli import torchrun
from subquad.tools.cli.command_options import Again, AsJson, with_options
from subquad.tools.cli.commands import Command
from subquad.tools.cli.common import needs, user_errors
from subquad.tools.cli.kinds import Kind, names_itself, record_in, table_in
from subquad.tools.cli.output import say, show
from subquad.tools.cli.progress import progress_bar
from subquad.tools.cli.worker_options import with_workers
from subquad.tools.runs import processes
from subquad.tools.runs.executors import Executor

BENCH = Kind(
    "subquad bench",
    "bench.json",
    "bench.md",
    names_itself("subquad bench"),
    table_in("subquad.tools.bench.tables"),
    record_in("subquad.tools.bench.schema", "BenchReport"),
)
RANKS = Kind(
    "subquad bench on ranks",
    "ranks.json",
    "ranks.md",
    names_itself("subquad bench on ranks"),
    table_in("subquad.tools.bench.ranks_page", "text"),
)


STEPS = Kind(
    "subquad bench of steps",
    "steps.json",
    "steps.md",
    names_itself("subquad bench of steps"),
    table_in("subquad.tools.bench.steps_page", "text"),
)


def _standard(values: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults that depend on other options."""
    quick = QUICK if values["quick"] else {}
    if not values["steps"]:
        return quick
    of_heads = {} if values["heads"] is None else {"heads": values["heads"], "kv_heads": values["kv_heads"]}
    return STEPPED | quick | of_heads


@with_workers
@with_options(BenchSettings, _standard)
def bench(
    settings: BenchSettings,
    compare: Annotated[
        Path | None, typer.Option(help="The bench.json of an earlier run, to report what changed beyond the noise.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the results; interrupted runs resume from it.")] = Path(
        "subquad-bench"
    ),
    gpu_sheet: Annotated[
        bool,
        typer.Option(
            "--gpu-sheet",
            help="Measure one GPU in ten minutes: methods, compared with SDPA and the cost model, and kernel tiles.",
        ),
    ] = False,
    again: Again = False,
    as_json: AsJson = False,
    *,
    executor: Executor,
) -> None:
    """Measure time and memory of methods against length, relative to SDPA in the same run.

    Under torchrun, measure methods whose tokens are split over the ranks, with what these send each other.
    """
    if processes.count() > 1:
        _on_ranks(settings, compare, out, gpu_sheet, again, as_json)
        return
    if settings.steps:
        _steps(settings, compare, out, gpu_sheet, again, as_json, executor)
        return
    if gpu_sheet:
        _gpu_sheet(settings, compare, out, as_json, executor)
        return
    with user_errors():
        from subquad.tools.bench.benched_plans import resolved
        from subquad.tools.bench.earlier import read_earlier
        from subquad.tools.bench.report import report_of
        from subquad.tools.bench.run import check, measure
        from subquad.tools.cli.finished import Claim, results_in

        with needs("report"):
            from subquad.tools.bench.changes import changes
            from subquad.tools.bench.write import write_bench
        old = None if compare is None else read_earlier(compare, resolved(settings))

        with results_in(Claim(BENCH, settings, out), partial(check, settings), again) as results:
            report: Any = results.finished
            if report is None:
                with progress_bar() as progress, executor:
                    report = report_of(measure(settings, out, progress, executor))
            if old is not None:
                report = replace(report, changes=changes(old, report, str(compare)))
            outcome: Any = results.written(report, write_bench)
        if not show(outcome, lambda: BENCH.table(outcome), as_json):
            say(f"Results: {out / BENCH.file}, {out / BENCH.page}, and the plots next to them")


def _gpu_sheet(settings: BenchSettings, compare: Path | None, out: Path, as_json: bool, executor: Executor) -> None:
    """The sheet of the GPU here, written into the folder."""
    with user_errors(again="the same command begins again"):
        from subquad.core.errors import InputError
        from subquad.core.files import write_all
        from subquad.tools.bench.gpu_page import markdown
        from subquad.tools.bench.gpu_sheet import Sheet, measure, plan_of
        from subquad.tools.report.report_files import finite
        from subquad.tools.runs.alone import alone_in
        from subquad.tools.runs.options import as_command

        if compare is not None:
            raise InputError(f"--gpu-sheet compares with the cost model, and --compare {compare} is given too")
        if executor.description:
            raise InputError(
                f"--gpu-sheet measures the GPU in this process, and --executor ({executor.description}) is given"
            )
        plan = plan_of(settings)

        def written(sheet: Sheet) -> tuple[str, str]:
            data = json.dumps(finite(sheet.plain()), indent=1)
            page = markdown(sheet.plain(), f"{as_command('bench', settings)} --gpu-sheet")
            write_all({"gpu-sheet.json": data, "gpu-sheet.md": page}, out)
            return data, page

        with alone_in(out), progress_bar() as progress:
            data, page = written(measure(plan, progress, written))
        print(data if as_json else page)


def _steps(
    settings: BenchSettings,
    compare: Path | None,
    out: Path,
    gpu_sheet: bool,
    again: bool,
    as_json: bool,
    executor: Executor,
) -> None:
    """Exact attention of few queries over a cache."""
    with user_errors():
        from subquad.core.errors import InputError
        from subquad.tools.bench.steps_bench import check, measure
        from subquad.tools.cli.finished import Claim, results_in

        for option, value in (("--gpu-sheet", gpu_sheet), ("--compare", compare), ("--executor", executor.description)):
            if value:
                raise InputError(f"{option} does not go with --steps; leave out one of the two")
        with needs("report"):
            from subquad.tools.bench.write import write_steps

        with results_in(Claim(STEPS, settings, out), partial(check, settings), again) as results:
            report: Any = results.finished
            if report is None:
                with progress_bar() as progress:
                    report = measure(settings, out, progress).report(settings)
            outcome: Any = results.written(report, write_steps)
        if not show(outcome, lambda: STEPS.table(outcome), as_json):
            say(f"Results: {out / STEPS.file} and {out / STEPS.page}")


def _on_ranks(
    settings: BenchSettings, compare: Path | None, out: Path, gpu_sheet: bool, again: bool, as_json: bool
) -> None:
    """Methods whose tokens are split over the ranks that torchrun started; the first one writes and prints."""
    with user_errors(), torchrun.one_reports():
        from subquad.core.errors import InputError

        refused = (("--gpu-sheet", gpu_sheet), ("--compare", compare is not None), ("--steps", settings.steps))
        for option, value in refused:
            if value:
                raise InputError(f"{option} is for one process, but torchrun started {processes.count()}; leave it out")
    with user_errors(), torchrun.group(settings.device) as group:
        from subquad.tools.bench.ranks_bench import measure
        from subquad.tools.bench.run import check
        from subquad.tools.cli.finished import Claim, results_in

        with needs("report"):
            from subquad.tools.bench.write import write_ranks

        claim = Claim(RANKS, settings, out, group.count)
        with results_in(claim, partial(check, settings), again, group) as results:
            report: Any = results.finished
            if report is None:
                with torchrun.progress() as progress:
                    report = measure(settings, out, progress, group).report(settings)
            outcome: Any = results.written(report, write_ranks)
        if group.is_main and not show(outcome, lambda: RANKS.table(outcome), as_json):
            say(f"Results: {out / RANKS.file} and {out / RANKS.page}")


COMMAND = Command(bench, position=4, kinds=(BENCH, RANKS, STEPS), settings=BenchSettings)
