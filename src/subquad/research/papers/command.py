"""`subquad reproduce`."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from subquad.tools.cli.command_options import Again, AsJson, DataDir, Device
from subquad.tools.cli.commands import Command
from subquad.tools.cli.common import needs, user_errors
from subquad.tools.cli.kinds import Kind, has, table_in
from subquad.tools.cli.output import results_console, say, show
from subquad.tools.cli.progress import progress_bar
from subquad.tools.cli.worker_options import with_workers
from subquad.tools.runs.alone import alone_in
from subquad.tools.runs.executors import Executor

REPRODUCE = Kind(
    "subquad reproduce",
    "results.json",
    "results.md",
    has("experiment", "results"),
    table_in("subquad.research.papers.write", "rich_record"),
)


def _experiments(incomplete: str) -> list[str]:
    """The names of experiments that begin like this."""
    from subquad.research.papers.catalogue import NAMES

    return [name for name in NAMES if name.startswith(incomplete)]


@with_workers
def reproduce(
    experiment: Annotated[
        str | None,
        typer.Argument(help="Name of the experiment; without it, list all.", autocompletion=_experiments),
    ] = None,
    scale: Annotated[
        str,
        typer.Option(
            help="smoke: seconds, to check that it runs; small: an hour per group of cells; paper: for a GPU."
        ),
    ] = "small",
    data_dir: DataDir = None,
    device: Device = "cpu",
    out: Annotated[Path | None, typer.Option(help="Folder for the results; default: subquad-EXPERIMENT-SCALE.")] = None,
    again: Again = False,
    override: Annotated[
        list[str] | None, typer.Option("--set", help="Replace a setting of the scale, as setting=value; repeatable.")
    ] = None,
    as_json: AsJson = False,
    *,
    executor: Executor,
) -> None:
    """Reproduce the papers' tables and figures, next to the published ones."""
    with user_errors(), needs("train"):
        from subquad.research.papers.catalogue import load
        from subquad.research.papers.overrides import read_changes
        from subquad.research.papers.run import reproduce as run
        from subquad.research.papers.run import run_folder
        from subquad.research.papers.write import as_record, write_results
        from subquad.tools.cli.finished import finished_in

        if experiment is None:
            _list(as_json)
            return
        chosen, changes = load(experiment), read_changes(override or ())
        folder = out or Path(f"subquad-{experiment}-{scale}")
        asked = run_folder(chosen, scale, folder, changes, data_dir, device)
        with alone_in(folder):
            record = finished_in(asked, REPRODUCE, again)
            if record is None:
                options: dict[str, Any] = {"data": data_dir, "device": device, "changes": changes, "again": again}
                with executor, progress_bar() as progress:
                    report = run(chosen, scale, folder, progress=progress, executor=executor, **options)
                write_results(*report, folder)
                record = as_record(*report)
        if not show(record, lambda: REPRODUCE.table(record), as_json):
            say(f"Results: {folder / REPRODUCE.file}, {folder / REPRODUCE.page}, and the plots next to them")


def _list(as_json: bool) -> None:
    """Print the experiments with their titles and sources."""
    from subquad.research.papers.catalogue import NAMES, load

    experiments = {name: load(name) for name in NAMES}
    if as_json:
        print(
            json.dumps(
                {name: {"title": one.title, "source": one.source} for name, one in experiments.items()}, indent=1
            )
        )
        return
    console = results_console()
    for name, one in experiments.items():
        say(f"{name:<24} {one.title} ({one.source})", console)


COMMAND = Command(reproduce, position=9, kinds=(REPRODUCE,))
