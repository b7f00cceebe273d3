"""The card beside a trained model's weights: what it does, how well, and how to have it again."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table


def training_card(record: Mapping[str, Any], name: str) -> str:
    """README.md of a run."""
    settings, task = record["settings"], record["task"]
    model = record["model"]
    lines = [
        "---",
        "library_name: transformers",
        "tags: [subquad]",
        "---",
        f"# {name}",
        f"{task['name']}: {task['summary']}. Attention: `{settings['model']['method']}`. "
        f"{record['parameters']:,} parameters.",
        "## Test examples",
        "\n".join(_rows(record)),
        f"The weights are those of step {record['best_step']:,} of {record['steps']:,}; "
        f"{record['training_seconds']:,} seconds of training on {record['processes']} process(es).",
        "## Use",
        f"```python\nfrom subquad.training.models import {model}\n\n"
        f'model = {model}.from_pretrained("{name}/model")\n```',
        "## Settings",
        *(f"**{table}**: " + ", ".join(f"{k} {v}" for k, v in values.items()) for table, values in settings.items()),
        "## Machine",
        ", ".join(f"{k} {v}" for k, v in {**record["machine"], **record["versions"]}.items()),
    ]
    return "\n".join(lines[:4]) + "\n\n" + "\n\n".join(lines[4:]) + "\n"


def rich_figures(record: Mapping[str, Any]) -> Table:
    """The test figures beside the baselines, as a terminal shows them."""
    names = _names(record)
    table = Table("", *names, title=record["task"]["summary"], title_justify="left", box=None, pad_edge=False)
    for row, figures in _all(record).items():
        table.add_row(row, *(_text(figures.get(name)) for name in names))
    return table


def _all(record: Mapping[str, Any]) -> dict[str, Mapping[str, float]]:
    return {str(record["settings"]["model"]["method"]): record["test"]} | dict(record["baselines"])


def _names(record: Mapping[str, Any]) -> list[str]:
    """The metrics, with the one that the best is chosen by first."""
    first = record["task"]["metric"]
    return [first] + [name for name in record["test"] if name != first]


def _rows(record: Mapping[str, Any]) -> list[str]:
    names = _names(record)
    lines = ["| | " + " | ".join(names) + " |", "|" + " --- |" * (len(names) + 1)]
    for row, figures in _all(record).items():
        lines.append(f"| {row} | " + " | ".join(_text(figures.get(name)) for name in names) + " |")
    return lines


def _text(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"
