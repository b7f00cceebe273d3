"""`subquad methods`: the methods, and what each of them can do."""

import inspect
import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from subquad.methods import Method, Traits, explained, parse_method
from subquad.methods.core.plugins import all_methods
from subquad.tools.cli.command_options import AsJson
from subquad.tools.cli.common import user_errors
from subquad.tools.cli.completion import method_texts
from subquad.tools.cli.output import results_console
from subquad.tools.report.terminal import ruled

CAUSAL = {"strict": "yes", "values-only": "of values", "no": "no"}


def methods(
    name: Annotated[
        str | None,
        typer.Argument(help="Name of a method, to see all that it can do.", autocompletion=method_texts),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the methods, or what one of them can do."""
    from subquad.core.errors import as_input_error

    with user_errors(), as_input_error():
        chosen = [cls() for cls in all_methods().values()] if name is None else [parse_method(name)]
        if as_json:
            print(json.dumps({method.name: _traits(method) for method in chosen}, indent=1, default=str))
            return
        results_console().print(_list() if name is None else Group(*map(_described, chosen)))


def _list() -> RenderableType:
    """A line for each method: its name, whether it can be causal, whether it learns, and what it is."""
    table = ruled()
    for head in ("method", "causal", "learned"):
        table.add_column(head, no_wrap=True)
    table.add_column("what it is", overflow="fold")
    for name, cls in all_methods().items():
        learned = "yes" if cls.traits.learned else "no"
        table.add_row(name, CAUSAL[cls.traits.causal], learned, Text(_summary(cls)))
    lines = (
        "`subquad methods NAME` describes a method and its settings.",
        "A bound method is one that is attached to a layer, by sq.hf.swap or sq.nn.MultiheadAttention.",
    )
    return Group(table, *(Text(line, "dim") for line in lines))


def _summary(cls: type[Method]) -> str:
    """The first sentences of a method's description."""
    return (inspect.getdoc(cls) or "").partition("\n")[0]


def _described(method: Method) -> RenderableType:
    """All that is known of a method."""
    able, unable = _abilities(method.traits)
    rows = {
        "what it is": _summary(type(method)),
        "settings": "as below" if type(method).defaults() else "none",
        "supports": ", ".join(able),
        "refuses": ", ".join(unable) or "nothing",
        "cost": method.traits.complexity,
        "source": method.traits.source,
        "page": f"docs/methods/{method.name}.md",
    }
    explanation, changed = explained(type(method)), {k: v for k, v in method.to_dict().items() if k != "name"}
    settings = pairs({f"{name}={value}": explanation.get(name, "") for name, value in changed.items()})
    shown: list[RenderableType] = [Text("settings", "bold"), settings] if changed else []
    return Group(Text(method.name, "bold"), pairs(rows), *shown)


def pairs(rows: Mapping[str, str]) -> Table:
    """Names with texts next to them."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows.items():
        table.add_row(Text(name), Text(text))
    return table


def _traits(method: Method) -> dict[str, Any]:
    return {"settings": method.to_dict(), **{k: v for k, v in vars(method.traits).items() if k != "example"}}


def _abilities(traits: Traits) -> tuple[list[str], list[str]]:
    """The abilities and refusals of a method, in words."""
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
