"""`subquad calibrate`."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from subquad.cli.common import needs, progress_bar, say, user_errors, working_in
from subquad.cli.options import AsJson, Column, Device, Model


def calibrate(
    model: Model = None,
    method: Annotated[
        str, typer.Option(help='A method with learned parameters, as "name:setting=value,…".')
    ] = "lha-tail",
    text: Annotated[
        list[Path] | None, typer.Option(help="Plain text to fit on: file, folder, .jsonl, .csv; repeatable.")
    ] = None,
    column: Column = "text",
    steps: Annotated[int | None, typer.Option(help="At most so many steps; default: the method's own recipe.")] = None,
    max_length: Annotated[
        int | None, typer.Option(help="Tokens of a passage; default: the model's positions, at most 512.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Passages a step.")] = 1,
    seed: Annotated[int, typer.Option(help="Of the order of the passages, and which are kept apart.")] = 0,
    device: Device = "cpu",
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder for the adapter; an interrupted run goes on from it.")
    ] = Path("subquad-adapter"),
    as_json: AsJson = False,
) -> None:
    """Fit a method's learned parameters to a frozen model, from plain text."""
    from subquad.errors import InputError

    with user_errors(), needs("demo"):
        from subquad.report.adapter_card import rich_layers, untouched
        from subquad.workflows.calibrate import Settings, save
        from subquad.workflows.calibrate import calibrate as run

        if not text:
            raise InputError("no text to fit on: give --text FILE or FOLDER")
        settings = Settings(
            method=method,
            text=tuple(text),
            model=model,
            column=column,
            steps=steps,
            max_length=max_length,
            batch=batch,
            seed=seed,
            device=device,
        )
        with working_in(out):
            _check_free(out)
            with progress_bar() as progress:
                fitted = run(settings, out, progress)
            save(fitted, out)
    if as_json:
        print(json.dumps(fitted.record, indent=1))
        return
    console = Console()
    console.print(rich_layers(fitted.record))
    for number, reason in fitted.refused.items():
        say(f"layer {number} was left exact: {reason}", console)
    if untouched(fitted.record):
        say(untouched(fitted.record), console)
    say(f"Adapter: {out} ({fitted.record['ended']}, {fitted.record['seconds']:.0f} s)", console)


def _check_free(out: Path) -> None:
    """InputError where something lies in the folder that the adapter would replace."""
    from subquad.errors import InputError
    from subquad.workflows.store import begun_in

    if (out / "adapter.json").exists():
        raise InputError(f"{out} holds an adapter already: use it, remove it, or give another folder with --out")
    if (out / "README.md").exists() and not begun_in(out):  # else it is the card of a run that was cut off
        raise InputError(f"{out} has a README.md, which the adapter's card would replace; give another folder")
