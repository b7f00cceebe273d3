"""Code for scripts with tables: times side by side, memory in a process of its own, Markdown with its origin."""

import inspect
import math
import os
import re
import shlex
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import torch

from subquad.core.errors import InputError
from subquad.core.files import write
from subquad.tools.bench.calls import Load
from subquad.tools.bench.calls import threads as use_threads
from subquad.tools.bench.extra_memory import extra_memory
from subquad.tools.measure.timing import Effort, until_steady
from subquad.tools.report.report_files import as_json
from subquad.tools.runs import machine

HEADS, WIDTH = 6, 64
MISSING = "–"
THREADS = torch.get_num_threads()
DATA = Path(os.environ.get("SUBQUAD_DATA", ""))
DATA_OR_LOCAL = Path(os.environ.get("SUBQUAD_DATA", "data"))


def run(main: Callable[..., None]) -> None:
    """Run a function as a script: its parameters are the options, and its module's docstring is the help.

    An option whose type is `tuple[int, ...]` or `tuple[str, ...]` takes one text, of values separated by spaces.
    Every script has the option `--threads`, which sets the number of torch's threads.
    """
    import typer  # in this function, because on_gpu.py imports this file on machines without typer

    def command(**options: Any) -> None:
        try:
            with use_threads(options["threads"]):
                main(**{name: value for name, value in options.items() if name in own})
        except InputError as error:
            raise SystemExit(str(error)) from None

    own = inspect.signature(main).parameters
    threads = inspect.Parameter("threads", inspect.Parameter.KEYWORD_ONLY, default=THREADS, annotation=int)
    parameters = [_as_option(each) for each in {**own, "threads": own.get("threads", threads)}.values()]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(help=re.sub(r"^|(?<=\n\n)", "\b\n", str(sys.modules[main.__module__].__doc__)))(command)
    app()


def _as_option(parameter: inspect.Parameter) -> inspect.Parameter:
    """A parameter as typer reads it, with a reader of whole numbers or names where it takes several of them."""
    import typer

    kind, info = parameter.annotation, typer.Option()
    if get_origin(kind) is Annotated:
        kind, info = get_args(kind)
    if get_origin(kind) is not tuple:
        return parameter
    numbers, option = int in get_args(kind), f"--{parameter.name.replace('_', '-')}"

    def read(text: Any) -> Any:
        if isinstance(text, tuple):  # the default
            return text
        words = text.replace(",", " ").split() if numbers else text.split()
        if not words or (numbers and not all(map(str.isdecimal, words))):
            raise typer.BadParameter(f"{text!r} must be {'whole numbers' if numbers else 'names'} separated by spaces")
        for given, second in zip(sys.argv, sys.argv[2:], strict=False):
            if given == option and not second.startswith("-") and not Path(second).exists():  # which may be an argument
                raise typer.BadParameter(f"several values need quotes: {option} '{text} {second}'")
        return tuple(map(int, words) if numbers else words)

    info.parser, info.metavar = read, "'VALUE …'"
    info.show_default = " ".join(map(str, parameter.default)) or False
    return parameter.replace(annotation=Annotated[Any, info])


def check_known(option: str, words: Iterable[str], known: Iterable[str]) -> None:
    """Check that words are among the known ones.

    Raises:
        typer.BadParameter: one is not.
    """
    import typer

    for word in words:
        if word not in known:
            raise typer.BadParameter(f"{word!r} is none of {', '.join(known)}", param_hint=option)


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


def command() -> str:
    """The command that this script was run with."""
    return shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])


def publish(title: str, parts: Sequence[str], out: Path | None, dtype: str = "fp32", records: object = None) -> None:
    """Print a sheet, with the command and the machine that it comes from; write it to a file if one is given.

    `records` are its figures as plain data, which are written next to it as JSON.
    """
    about, versions = machine.hardware(), machine.versions()
    load = (
        f" The machine's load was {os.getloadavg()[0]:.1f}, this run's included." if hasattr(os, "getloadavg") else ""
    )
    facts = (
        f"`{command()}`: {about['processor']}, {about['threads']} threads, {about['cpu_capability']}, torch "
        f"{versions['torch']}, subquad {versions['subquad']}, {dtype}.{load}"
    )
    text = "\n\n".join([f"# {title}", *parts, facts]) + "\n"
    print(text)
    if out is not None:
        write(out, text)
        if records is not None:
            write(out.with_suffix(".json"), as_json(records))
