"""Code for scripts with tables: times side by side, memory in a process of its own, Markdown with its origin."""

import argparse
import inspect
import math
import os
import shlex
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import torch

from subquad.core.files import write
from subquad.tools.bench.calls import Load
from subquad.tools.bench.memory import extra_memory
from subquad.tools.measure.timing import Effort, until_steady
from subquad.tools.runs import machine
from subquad.tools.runs.common_options import read_list

HEADS, WIDTH = 6, 64
MISSING = "–"
THREADS = torch.get_num_threads()
DATA = Path(os.environ.get("SUBQUAD_DATA", ""))


def run(main: Callable[..., None]) -> None:
    """Run a function as a script: its parameters are the options, and its module's docstring is the help.

    An option whose type is `tuple[int, ...]` or `tuple[str, ...]` takes one text, of values separated by spaces.
    """
    import typer  # in this function, because on_gpu.py imports this file on machines without typer

    @wraps(main)
    def command(**arguments: Any) -> None:
        main(**{name: value for name, value in arguments.items() if value is not None})

    parameters = []
    for parameter in inspect.signature(main).parameters.values():
        is_annotated = get_origin(parameter.annotation) is Annotated
        kind, info = get_args(parameter.annotation) if is_annotated else (parameter.annotation, typer.Option())
        if get_origin(kind) is tuple:
            info.parser, info.metavar = _reader(get_args(kind)[0]), "'VALUE …'"
            info.show_default = " ".join(map(str, parameter.default)) or False
            parameter = parameter.replace(annotation=Annotated[str, info], default=None)
        parameters.append(parameter)
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    paragraphs = str(sys.modules[main.__module__].__doc__).split("\n\n")
    app.command(help="\n\n".join(f"\b\n{paragraph}" for paragraph in paragraphs))(command)
    app()


def _reader(kind: type) -> Callable[[str], tuple[Any, ...]]:
    """A reader of a text of several whole numbers, which commas may separate as well as spaces, or names."""
    import typer

    def read(text: str) -> tuple[Any, ...]:
        try:
            values = tuple(text.split()) if kind is str else tuple(map(kind, read_list(text)))
        except ValueError:
            values = ()
        if not values:
            kinds = "names" if kind is str else "whole numbers"
            raise typer.BadParameter(f"{text!r} must be {kinds} separated by spaces")
        return values

    return read


def check_known(option: str, words: Iterable[str], known: Iterable[str]) -> None:
    """Check that words are among the known ones.

    Raises:
        typer.BadParameter: one is not.
    """
    import typer

    for word in words:
        if word not in known:
            raise typer.BadParameter(f"{word!r} is none of {', '.join(known)}", param_hint=option)


def arguments(text: str, lengths: Sequence[int], **others: object) -> argparse.ArgumentParser:
    """Options that all scripts have. `others`: more options with their defaults; a tuple takes several."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {
        "lengths": tuple(lengths),
        "threads": torch.get_num_threads(),
        **others,
    }.items():
        several = {"nargs": "+", "type": type(value[0])} if isinstance(value, tuple) else {"type": type(value)}
        parser.add_argument(f"--{name}", default=value, **several)
    parser.add_argument("--out", type=Path)
    return parser


def load_of(length: int, *, causal: bool = False, heads: int = HEADS) -> Load:
    """One item with standard normal q, k and v in fp32: 6 heads of 64, if nothing else is said."""
    return Load(length, "float32", "forward", 1, heads, WIDTH, "cpu", 0, causal)


def milliseconds(calls: Mapping[str, Callable[[], object]], seconds: float) -> dict[str, list[float]]:
    """The time of each call, round by round: every round runs all of them once, so that all meet the same noise."""
    times = until_steady(calls, Effort(seconds=seconds, least=2, enough=5, precision=0.02))
    return {name: [1e3 * each for each in own] for name, own in times.items()}


def peak_alone(load: Load, method: str, threads: int) -> int | None:
    """Peak extra bytes of a call in a process of its own; None where it does not survive."""
    return extra_memory(load, method, threads).bytes


def slope(lengths: Sequence[int], values: Sequence[float]) -> float:
    """The exponent p of values ∝ lengthᵖ: least squares on logarithms."""
    x, y = ([math.log(each) for each in of] for of in (lengths, values))
    return statistics.linear_regression(x, y).slope


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown: the first column to the left, the others to the right."""
    lines = [head, [":---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def publish(title: str, parts: Sequence[str], out: Path | None, dtype: str = "fp32") -> None:
    """Print a sheet, with the command and the machine that it comes from; write it to a file where one is given."""
    about, versions = machine.hardware(), machine.versions()
    command = shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    load = (
        f" The machine's load was {os.getloadavg()[0]:.1f}, this run's included." if hasattr(os, "getloadavg") else ""
    )
    facts = (
        f"`{command}`: {about['processor']}, {about['threads']} threads, {about['cpu_capability']}, torch "
        f"{versions['torch']}, subquad {versions['subquad']}, {dtype}.{load}"
    )
    text = "\n\n".join([f"# {title}", *parts, facts]) + "\n"
    print(text)
    if out is not None:
        write(out, text)
