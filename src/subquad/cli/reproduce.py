"""`subquad reproduce`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from subquad.cli.common import needs, show, user_errors, working_in
from subquad.cli.completion import experiments
from subquad.cli.options import AsJson, DataDir, Device
from subquad.cli.output import results_console, say
from subquad.cli.progress import progress_bar
from subquad.cli.workers import with_workers
from subquad.executors import Executor


@with_workers
def reproduce(
    experiment: Annotated[
        str | None,
        typer.Argument(help="Name of the experiment; without it, list all.", autocompletion=experiments),
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
    resume: Annotated[bool, typer.Option("--resume", help="Resume the run that the folder holds.")] = False,
    override: Annotated[
        list[str] | None, typer.Option("--set", help="Replace a setting of the scale, as setting=value; repeatable.")
    ] = None,
    as_json: AsJson = False,
    *,
    executor: Executor,
) -> None:
    """Reproduce the papers' tables and figures, next to the published ones."""
    with user_errors("the same command with --resume continues from here"), needs("train"):
        from subquad.papers import load
        from subquad.papers.overrides import read_changes
        from subquad.papers.run import reproduce as run
        from subquad.report.experiment_write import as_record, write_results
        from subquad.report.kinds import REPRODUCE

        if experiment is None:
            _list(as_json)
            return
        chosen = load(experiment)
        folder = out or Path(f"subquad-{experiment}-{scale}")
        with working_in(folder):
            with executor, progress_bar() as progress:
                header, results, cells = run(
                    chosen,
                    scale,
                    folder,
                    data=data_dir,
                    device=device,
                    resume=resume,
                    changes=read_changes(override or ()),
                    progress=progress,
                    executor=executor,
                )
            paths = write_results(header, results, cells, folder)
        record = as_record(header, results, cells)
        if not show(record, lambda: REPRODUCE.table(record), as_json):
            say(f"Results: {', '.join(map(str, paths))}")


def _list(as_json: bool) -> None:
    """Print the experiments with their titles and sources."""
    from subquad.papers import NAMES, load

    found = {name: load(name) for name in NAMES}
    if as_json:
        print(json.dumps({name: {"title": one.title, "source": one.source} for name, one in found.items()}, indent=1))
        return
    console = results_console()
    for name, one in found.items():
        say(f"{name:<24} {one.title} ({one.source})", console)
