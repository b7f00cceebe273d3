"""The arguments of `subquad train` and `subquad tune`: a task, and tables of settings over its defaults."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from subquad.tools.cli.completion import method_texts

Method = Annotated[
    str | None,
    typer.Option(
        help='Method of every layer, as "name:setting=value,…"; sets model.method.', autocompletion=method_texts
    ),
]
Config = Annotated[
    Path | None, typer.Option(help=r"A TOML file with the tables \[task], \[model], \[training] and \[parallel].")
]
Override = Annotated[
    list[str] | None, typer.Option("--set", help="Override a setting, as table.setting=value; repeatable.")
]
Tables = Mapping[str, Mapping[str, Any]]


def tables_of(
    task: str | None, config: Path | None, override: Sequence[str] | None, **model: str | None
) -> tuple[str | None, list[Tables]]:
    """The task, where one is named here or in the file, and its tables of settings; later ones win.

    `model` are settings of the model that have options of their own.
    """
    from subquad.research.papers import catalogue as _with_their_tasks  # noqa: F401
    from subquad.research.training.settings import read_overrides, read_toml

    tables: list[Tables] = [read_toml(config)] if config else []
    task = task or (tables[0].get("task", {}).get("name") if tables else None)
    tables += [{"model": {name: value for name, value in model.items() if value}}]
    return task, [*tables, read_overrides(override or ())]
