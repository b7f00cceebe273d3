"""`subquad reproduce`."""

from pathlib import Path
from typing import Annotated

import typer

from subquad.cli.common import needs, progress_bar, results_console, say, user_errors, working_in
from subquad.cli.options import DataDir, Device


def reproduce(
    experiment: Annotated[str | None, typer.Argument(help="Name of the experiment; without it, list all.")] = None,
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
) -> None:
    """Reproduce the papers' tables and figures, next to the published ones."""
    with user_errors("the same command with --resume continues from here"), needs("train"):
        from subquad.papers import NAMES, load
        from subquad.papers.overrides import read_changes
        from subquad.papers.run import reproduce as run
        from subquad.report.experiment_write import rich_results, write_results

        console = results_console()
        if experiment is None:
            for name in NAMES:
                found = load(name)
                say(f"{name:<24} {found.title} ({found.source})", console)
            return
        chosen = load(experiment)
        folder = out or Path(f"subquad-{experiment}-{scale}")
        with working_in(folder):
            with progress_bar() as progress:
                header, results, cells = run(
                    chosen,
                    scale,
                    folder,
                    data=data_dir,
                    device=device,
                    resume=resume,
                    changes=read_changes(override or ()),
                    progress=progress,
                )
            paths = write_results(header, results, cells, folder)
    console.print(rich_results(header, results))
    say(f"Results: {', '.join(map(str, paths))}", console)
