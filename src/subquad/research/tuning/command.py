"""`subquad tune`."""

from pathlib import Path
from typing import Annotated

import typer

from subquad.research.training.task_arguments import Config, Method, Override, tables_of
from subquad.tools.cli.command_options import Again, AsJson, DataDir, Device
from subquad.tools.cli.commands import Command
from subquad.tools.cli.common import needs, user_errors
from subquad.tools.cli.kinds import Kind, names_itself, record_in, table_in
from subquad.tools.cli.output import say, show
from subquad.tools.cli.progress import progress_bar
from subquad.tools.cli.worker_options import with_workers
from subquad.tools.runs.alone import alone_in
from subquad.tools.runs.executors import Executor

TUNE = Kind(
    "subquad tune",
    "results.json",
    "results.md",
    names_itself("subquad tune"),
    table_in("subquad.research.tuning.write"),
    record_in("subquad.research.tuning.schema", "TuneReport"),
)


@with_workers
def tune(
    task: Annotated[str | None, typer.Argument(help="Name of the task; `subquad train` lists all.")] = None,
    search: Annotated[
        list[str] | None,
        typer.Option(
            help="What to search: table.setting=LOW:HIGH, =LOW:HIGH:log, =LOW:HIGH:STEP or =A,B,C, where table is "
            "task, model, training, or method for settings of the method; repeatable."
        ),
    ] = None,
    trials: Annotated[int, typer.Option(help="Total trials in the folder, earlier ones included.")] = 20,
    prune: Annotated[
        bool, typer.Option("--prune", help="End trials whose validations are worse than the median of the others.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Random seed of the search.")] = 0,
    method: Method = None,
    config: Config = None,
    override: Override = None,
    data_dir: DataDir = None,
    device: Device = "cpu",
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the search; rerun the command to resume.")] = Path(
        "subquad-tune"
    ),
    again: Again = False,
    as_json: AsJson = False,
    *,
    executor: Executor,
) -> None:
    """Search settings of a method and of training for the best validation figure of a task."""
    with user_errors(), needs("tune"):
        from subquad.core.errors import InputError
        from subquad.research.tuning.record import record_of
        from subquad.research.tuning.run import Tuning, check, search_folder
        from subquad.research.tuning.run import tune as run
        from subquad.research.tuning.search import Base
        from subquad.research.tuning.write import write_tune
        from subquad.tools.cli.finished import finished_in

        named, tables = tables_of(task, config, override, method=method)
        if named is None:
            raise InputError("no task is named; give subquad tune TASK …, where `subquad train` lists all")
        asked = Tuning(Base(named, tuple(tables)), tuple(search or ()), out, trials, prune, seed, data_dir, device)
        check(asked, executor)
        words = [named, *_words(method, config, override, data_dir, device)]
        with alone_in(out):
            record = finished_in(search_folder(asked), TUNE, again)
            if record is None:
                with executor, progress_bar() as progress:
                    rows = run(asked, progress, executor, again)
                record = record_of(asked, rows, words, executor.description)
                write_tune(record, out)
        if not show(record, lambda: TUNE.table(record), as_json):
            say(f"Results: {out / TUNE.file}, {out / TUNE.page}, and the plots next to them")


def _words(
    method: str | None, config: Path | None, override: list[str] | None, data_dir: Path | None, device: str
) -> list[str]:
    """The options that `subquad train` has too, as they were given."""
    options = {"--config": config, "--method": method, "--data-dir": data_dir}
    words = [word for name, value in options.items() if value is not None for word in (name, str(value))]
    words += [word for text in override or () for word in ("--set", text)]
    return words if device == "cpu" else [*words, "--device", device]


COMMAND = Command(tune, position=8, kinds=(TUNE,))
