"""Options for where the cells of a run are computed, for every command that has cells."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any

import typer

from subquad.tools.cli import torchrun
from subquad.tools.runs import processes

PANEL = "Workers"
_OPTIONS: dict[str, tuple[Any, Any, str]] = {
    "executor": (
        str,
        "here",
        "Executor of the cells: here, one after another; processes, on this machine; or ray, a Ray cluster.",
    ),
    "workers": (
        int | None,
        None,
        "Maximum number of cells at once; default: one per core or GPU, and on a Ray cluster as many as have room.",
    ),
    "address": (str | None, None, "The Ray cluster; default: RAY_ADDRESS, or one that is started on this machine."),
    "resources": (
        str | None,
        None,
        "Resources of a cell on a Ray cluster, as cpus=2,gpus=1,memory=8GB; default: one core.",
    ),
}


def with_workers(command: Callable[..., None]) -> Callable[..., None]:
    """A command with an `executor` and its options after its own.

    The command enters the executor itself, once it knows that there is something to run.
    """
    in_signature = [p for p in inspect.signature(command).parameters.values() if p.name != "executor"]

    @wraps(command)
    def run(**options: Any) -> None:
        from subquad.core.errors import InputError
        from subquad.tools.cli.common import user_errors
        from subquad.tools.runs.executors import make_executor

        asked = {name: options.pop(name) for name in _OPTIONS}
        with user_errors(), torchrun.one_reports():
            if asked["executor"] != "here" and processes.count() > 1:
                raise InputError(
                    f"--executor {asked['executor']} starts processes of its own, but torchrun started "
                    f"{processes.count()} over which tokens are split; leave out one of the two"
                )
            executor = make_executor(
                asked["executor"],
                workers=asked["workers"],
                address=asked["address"],
                resources=asked["resources"],
                device=options["device"],
            )
        command(executor=executor, **options)

    added = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=Annotated[kind, typer.Option(help=help, rich_help_panel=PANEL)],
        )
        for name, (kind, default, help) in _OPTIONS.items()
    ]
    run.__signature__ = inspect.Signature([*in_signature, *added])  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in (*in_signature, *added)}
    return run
