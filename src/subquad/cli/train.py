"""`subquad train`."""

import json
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from subquad.cli.common import check_folder, needs, progress_bar, user_errors, writing
from subquad.cli.options import AsJson, DataDir, Device


def train(
    task: Annotated[str | None, typer.Argument(help="Its name; none: list all.")] = None,
    method: Annotated[
        str | None, typer.Option(help='The attention of every layer, as "name:setting=value,…": model.method.')
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="A TOML file with the tables [task], [model] and [training].")
    ] = None,
    override: Annotated[
        list[str] | None, typer.Option("--set", help="table.setting=value, over the file; repeatable.")
    ] = None,
    data_dir: DataDir = None,
    device: Device = "cpu",
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the run.")] = Path("subquad-run"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in the folder.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train a model on a task with any attention, alone or with torchrun on several processes."""
    with user_errors(), needs("train"):
        from subquad.report.training_card import rich_figures
        from subquad.training.settings import read_overrides, read_toml, settings_of
        from subquad.training.tasks import TASKS
        from subquad.workflows.train import run

        console = Console()
        if task is None:
            for name, kind in TASKS.items():
                console.print(f"{name:<12} {kind.summary}", soft_wrap=True, highlight=False)
            return
        given = [read_toml(config)] if config else []
        given += [{"model": {"method": method}}] if method else []
        settings = settings_of(task, *given, read_overrides(override or ()))
        check_folder(out)
        with progress_bar() as progress, writing(out):
            record = run(settings, out, data=data_dir, device=device, resume=resume, progress=progress)
    if int(os.environ.get("RANK", "0")):
        return
    if as_json:
        print(json.dumps(record, indent=1))
        return
    console.print(rich_figures(record))
    console.print(f"{record['steps']:,} steps, {record['training_seconds']:,} s. Run: {out}", soft_wrap=True)
