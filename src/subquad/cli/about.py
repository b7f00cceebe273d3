"""`subquad methods` and `subquad doctor`: the methods, and what can run on this machine."""

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from subquad.cli.common import user_errors
from subquad.methods import METHODS, Traits, parse_method


def methods(
    name: Annotated[str | None, typer.Argument(help="Name of a method; default: all.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """List the methods and what each can do."""
    from subquad.errors import as_input_error

    with user_errors(), as_input_error():
        chosen = METHODS if name is None else {(method := parse_method(name)).name: type(method)}
    if as_json:
        print(json.dumps({name: _traits(name) for name in chosen}, indent=1, default=str))
        return
    console = Console()
    for name, cls in chosen.items():
        able, unable = _abilities(cls.traits)
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 2))
        table.add_row("settings", ", ".join(f"{k}={v}" for k, v in cls().to_dict().items() if k != "name") or "none")
        table.add_row("supports", ", ".join(able))
        table.add_row("refuses", ", ".join(unable) or "nothing")
        table.add_row("cost", cls.traits.complexity)
        table.add_row("source", cls.traits.source)
        console.print(f"[bold]{name}[/]")
        console.print(table)


def doctor() -> None:
    """Show versions, hardware, and which backends can run here, or why not."""
    from subquad.workflows import machine

    table = Table(box=None, show_header=False)
    for what, found in (machine.versions() | machine.hardware() | machine.backends()).items():
        table.add_row(what, Text(found))
    Console().print(table)


def _traits(name: str) -> dict[str, Any]:
    cls = METHODS[name]
    return {"settings": cls().to_dict(), **{k: v for k, v in vars(cls.traits).items() if k != "example"}}


def _abilities(traits: Traits) -> tuple[list[str], list[str]]:
    """What a method supports and what it refuses, in words."""
    words = {
        "causal masks" + (" (of values only)" if traits.causal == "values-only" else ""): traits.causal != "no",
        "cross-attention": traits.cross,
        "steps on a cache": traits.cross or traits.cached,
        "decoding from a state": traits.recurrent,
        "windows": traits.window,
        "dense masks": traits.dense_mask,
        "bias": traits.bias,
        "the log-sum-exp": traits.lse,
    }
    return [word for word, can in words.items() if can], [word for word, can in words.items() if not can]
