"""`subquad train`."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from subquad.research.training.task_arguments import Config, Method, Override, tables_of
from subquad.tools.cli import torchrun
from subquad.tools.cli.command_options import Again, AsJson, DataDir, Device
from subquad.tools.cli.commands import Command
from subquad.tools.cli.common import needs, say_error_after, user_errors
from subquad.tools.cli.kinds import Kind, has, table_in
from subquad.tools.cli.output import errors, results_console, say, show
from subquad.tools.cli.stopped import exit_message, stops_first
from subquad.tools.runs.alone import alone_in

OUT = Path("subquad-run")

TRAIN = Kind(
    "subquad train",
    "results.json",
    "README.md",
    has("task", "test"),
    table_in("subquad.research.training.model_card", "rich_record"),
)


def train(
    task: Annotated[
        str | None, typer.Argument(help="Name of the task; without it and without --config, list all.")
    ] = None,
    method: Method = None,
    plan: Annotated[
        Path | None, typer.Option(help="A plan that subquad plan wrote, for a model of the same layers: model.plan.")
    ] = None,
    config: Config = None,
    override: Override = None,
    data_dir: DataDir = None,
    device: Device = "cpu",
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the run.")] = OUT,
    again: Again = False,
    as_json: AsJson = False,
) -> None:
    """Train a model on a task with any attention method, in one process or under torchrun."""
    with _ends(out), needs("train"):
        from subquad.research.training.settings import settings_of
        from subquad.research.training.tasks import TASKS
        from subquad.research.training.workflow import run, training_folder, with_earlier_warmup
        from subquad.tools.cli.finished import finished_in
        from subquad.tools.runs import processes

        task, tables = tables_of(task, config, override, method=method, plan=str(plan) if plan else None)
        if task is None:
            if method or plan or config or override or again or as_json or (device, out) != ("cpu", OUT):
                _name_a_task(TASKS)
            console = results_console()
            for name, kind in TASKS.items():
                say(f"{name:<12} {kind.summary}", console)
            return
        settings = settings_of(task, *tables)
        # Several processes are one run: the first of them holds its folder. All of them find the same in it, because
        # `train` changes nothing there before all of them have joined.
        with nullcontext() if processes.number() else alone_in(out):
            settings = with_earlier_warmup(settings, tables, out, device, again)
            record = finished_in(training_folder(settings, out, device), TRAIN, again)
            if record is None:
                with torchrun.progress() as progress:
                    record = run(settings, out, data=data_dir, device=device, again=again, progress=progress)
        processes.leave()
        # Of several processes, only the first shows the record.
        if processes.number() == 0 and not show(record, lambda: TRAIN.table(record), as_json):
            say(f"Run: {out}")


def _name_a_task(tasks: Iterable[str]) -> NoReturn:
    """These options configure a training run, but no task is given."""
    from subquad.core.errors import InputError

    raise InputError(f"no task is named; give subquad train TASK …, where `subquad train` lists all {len(list(tasks))}")


@contextmanager
def _ends(out: Path) -> Iterator[None]:
    """Report every early end in one line, once; if one of several processes failed, that one reports it."""
    from subquad.core.errors import Ended, InputError
    from subquad.tools.runs import processes

    with user_errors():
        try:
            with stops_first():
                yield
        except Ended as error:
            if processes.count() == 1:
                raise
            raise InputError(f"process {processes.number()}: {error}") from None
        except InputError:
            if processes.number() == 0:
                raise
            raise typer.Exit(2) from None
        except KeyboardInterrupt as stop:
            message, code = exit_message()
            if processes.number() == 0:
                say_error_after(stop)
                say(f"{message}; {_how_to_go_on(out)}", errors)
            raise typer.Exit(code) from None
        except OSError as error:
            raise InputError(f"{error.filename or out}: {error.strerror or error}; checkpoints are kept") from None


def _how_to_go_on(out: Path) -> str:
    from subquad.research.training.checkpoints import newest_step

    step = newest_step(out)
    if step:
        return f"the same command continues from step {step:,}"
    return "there is no checkpoint yet, so the same command starts again"


COMMAND = Command(train, position=7, kinds=(TRAIN,))
