"""`subquad doctor`."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from subquad.core import files
from subquad.methods.core import measured_crossovers
from subquad.methods.core.grammar import as_term
from subquad.methods.core.measured_crossovers import MeasuredCrossover, read_local, store
from subquad.tools.cli.about import pairs
from subquad.tools.cli.command_options import AsJson, with_options
from subquad.tools.cli.commands import Command
from subquad.tools.cli.common import user_errors
from subquad.tools.cli.output import say, show
from subquad.tools.cli.progress import progress_bar
from subquad.tools.doctor.settings import CrossoverSettings
from subquad.tools.report.terminal import ruled
from subquad.tools.runs.options import options

if TYPE_CHECKING:
    from subquad.tools.doctor.installation import Problem

NOT_MEASURED = "none measured on this machine with these threads and versions; `subquad doctor --measure` measures them"
LEGEND = (
    "Tokens from which on a method is faster than the fastest exact attention, SDPA or full:kernel=subquad, in forward "
    "passes. ≤: the crossover is at this measured length or below."
)


@with_options(CrossoverSettings)
def doctor(
    settings: CrossoverSettings,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Measure and store from how many tokens on methods are faster than exact attention here; the other "
            "options select methods and inputs.",
        ),
    ] = False,
    require: Annotated[
        list[str] | None,
        typer.Option(
            metavar="BACKEND",
            help="End with exit code 2 if this backend (cpu, triton, reference) cannot run here; repeatable.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what is installed against what is needed, hardware, crossovers, which backends run, and how to fix the rest.

    With --measure, measure from how many tokens on methods are faster than exact attention here, in about half a
    minute; by-length can start its steps there.
    """
    with user_errors(again="the same command begins again"):
        required = _known(require or [])
        if measure:
            _measure(settings, as_json)
        else:
            _show(settings, as_json)
        _check(required)


def _known(names: Sequence[str]) -> list[str]:
    """The names of backends, each once; InputError for a name that no backend has."""
    from subquad.core.errors import InputError
    from subquad.core.spelling import instead
    from subquad.kernels.dispatch import backends

    for name in names:
        if name not in backends():
            raise InputError(f"no backend {name!r}{instead(name, list(backends()), '')}")
    return list(dict.fromkeys(names))


def _check(required: Sequence[str]) -> None:
    """Raise InputError if one of these backends cannot run here."""
    from subquad.core.errors import InputError
    from subquad.kernels.dispatch import backends

    states = backends()
    missing = [name for name in required if states[name] != "available"]
    if missing:
        raise InputError("; ".join(f"backend {name!r} cannot run here: {states[name]}" for name in missing))


def _measure(settings: CrossoverSettings, as_json: bool) -> None:
    """Measure crossovers, store and print them."""
    from subquad.tools.doctor.measure_crossovers import measure

    files.check_writable(measured_crossovers.path())
    with progress_bar() as progress:
        measured = measure(settings, progress)
    file = store(measured)
    record = {"crossovers": [asdict(each) for each in measured], "file": str(file)}
    if not show(record, lambda: _table(measured), as_json):
        say(f"Stored: {file}, for by-length:steps=0:full:kernel=subquad+measured:{as_term(measured[0].method)}")


def _show(settings: CrossoverSettings, as_json: bool) -> None:
    """Print what is known of this machine."""
    import torch

    from subquad.core.errors import InputError
    from subquad.tools.doctor import installation
    from subquad.tools.runs import machine

    for name, each in options(CrossoverSettings).items():
        if getattr(settings, name) != each.default:
            raise InputError(f"{each.label} is an option of --measure; give both or none of them")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    installed, needed = machine.versions(), installation.required()
    here = machine.hardware(device) | installation.described() | machine.backends()
    local: list[MeasuredCrossover] = []
    message = NOT_MEASURED
    try:
        local = read_local()
    except InputError as error:  # of a damaged file
        message = str(error)
    problems = installation.problems(installed)
    record = {**installed, **here, "needed": needed, "problems": [each._asdict() for each in problems]}
    record |= {"crossovers": [asdict(each) for each in local]} | ({} if local else {"no crossovers": message})
    beside = {name: f"{version} ({needed[name]})" if name in needed else version for name, version in installed.items()}
    shown = beside | here | ({} if local else {"crossovers": message})
    blocks = [pairs(shown), *([Text(), _table(local)] if local else []), Text()]
    if not show(record, lambda: Group(*blocks), as_json):
        _say_remedies(problems)


def _say_remedies(problems: Sequence["Problem"]) -> None:
    """Print what is wrong here, each with the command that fixes it, in one line: broken ones could not be pasted."""
    say("To fix:" if problems else "Nothing to fix.")
    for each in problems:
        say(f"{each.problem}{':' * (each.command is not None)}")
        if each.command is not None:
            say(f"    {each.command}")


def _table(measured: Sequence[MeasuredCrossover]) -> RenderableType:
    """Crossovers by method and dtype, without and with a causal mask."""
    table = ruled()
    for head in ("method", "dtype", "heads", "no mask", "causal"):
        table.add_column(head, justify="right" if head in ("no mask", "causal") else "left", overflow="fold")
    rows: dict[tuple[str, str, str], dict[bool, str]] = {}
    for each in measured:
        device = each.machine["device"]
        key = (each.method, each.dtype + f" on {device}" * (device != "cpu"), f"{each.heads} of {each.head_dim}")
        rows.setdefault(key, {})[each.causal] = _in_words(each)
    for key, cells in rows.items():
        table.add_row(*map(Text, key), *(cells.get(causal, "–") for causal in (False, True)))
    return Group(table, Text(LEGEND, "dim"))


def _in_words(crossover: MeasuredCrossover) -> str:
    if crossover.start is None:
        return f"not up to {crossover.longest:,}"
    return f"{'≤' * (crossover.state != 'at')}{crossover.start:,}"


COMMAND = Command(doctor, position=10, settings=CrossoverSettings)
