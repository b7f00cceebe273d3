"""The card of a trained model: what the model does, its figures, and how to reproduce it."""

import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import tomli_w
from rich.console import Group, RenderableType
from rich.text import Text

from subquad.tools.report import cells
from subquad.tools.report.markup import escaped, rows_of
from subquad.tools.report.terminal import plain_table

PIPELINES = {  # of transformers: what is added to the making of one, and after a text
    "text-classification": (", truncation=True", "]"),
    "text-generation": ("", "], max_new_tokens=100"),
}


def training_card(record: Mapping[str, Any], name: str) -> str:
    """The README.md of a run; `name` is the name of its folder."""
    settings = record["settings"]
    parts = [
        "---\nlibrary_name: transformers\ntags: [subquad]\n---",
        f"# {name}",
        f"{_title(record)}. Attention: {_method(record)}. {record['parameters']:,} parameters." + _origin(record),
        "## Test examples",
        rows_of(_rows(record)),
        f"The weights are those of step {record['best_step']:,} of {record['steps']:,}; "
        f"{record['training_seconds']:,} seconds of training on {_processes(record['processes'])}.",
        "## Use",
        f"```python\n{_use(record, name)}\n```",
        "## Reproduce it",
        f"```sh\n{_command(record, name)}\n```",
        "`settings.toml`:",
        f"```toml\n{tomli_w.dumps(settings)}```",
        ", ".join(f"{k} {v}" for k, v in {**record["machine"], **record["versions"]}.items()),
    ]
    return "\n\n".join(parts) + "\n"


def _title(record: Mapping[str, Any]) -> str:
    """The title, which names what was learned: the user's own files, otherwise the task."""
    summary = escaped(record["task"]["summary"])
    files = record["settings"]["task"].get("files")
    return f"{summary[:1].upper()}{summary[1:]}" if files else f"{record['task']['name']}: {summary}"


def _processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"


def _use(record: Mapping[str, Any], name: str) -> str:
    """Code that loads the model; if it reads text, with its output for an example."""
    pipeline = record["task"].get("pipeline")
    if pipeline is None:
        return (
            f"from subquad.research.training.models import {record['model']}\n\n"
            f'model = {record["model"]}.from_pretrained("{name}/model")'
        )
    module = "hf" if "pretrained" in record["settings"]["model"] else "research.training.models"
    options, more = PIPELINES[pipeline]
    return (
        f"import subquad.{module}  # its attention comes with it\n"
        "from transformers import pipeline\n\n"
        f'run = pipeline("{pipeline}", "{name}/model"{options})\n'
        f'print(run(["A text."{more}))'
    )


def rich_record(record: Mapping[str, Any]) -> Group:
    """The record of a run as a terminal shows it."""
    took = f"{record['steps']:,} steps, {record['training_seconds']:,} s."
    return Group(Text(record["task"]["summary"]), rich_metrics(record), Text(took))


def rich_metrics(record: Mapping[str, Any]) -> RenderableType:
    """The test figures next to the baselines, as a terminal shows them."""
    rows = _rows(record)
    if len(_names(record)) > 4:  # than which there are seldom more rows: figures below each other stay whole
        rows = [list(column) for column in zip(*rows, strict=True)]
    return plain_table(rows[0], rows[1:])


def _command(record: Mapping[str, Any], name: str) -> str:
    """The command that trains the model, on the same number of processes and the same kind of device."""
    count, needs = record["processes"], record["task"]["needs"]
    start = "subquad" if count == 1 else f"torchrun --nproc-per-node {count} -m subquad"
    folder = shlex.quote(name)
    data = " --data-dir DATA" if needs else ""
    device = " --device cuda" if "gpu" in record["machine"] else ""
    return f"{start} train --config {folder}/settings.toml --out {folder}-again{data}{device}"


def _method(record: Mapping[str, Any]) -> str:
    """The method of all layers, or of each."""
    method = record["settings"]["model"]["method"]
    return f"`{method}`" if isinstance(method, str) else ", ".join(f"`{one}`" for one in method)


def _origin(record: Mapping[str, Any]) -> str:
    """The model that was fine-tuned, where it was one."""
    pretrained = record["settings"]["model"].get("pretrained")
    return f" Fine-tuned from `{pretrained}`." if pretrained else ""


def _all(record: Mapping[str, Any]) -> dict[str, Mapping[str, float]]:
    method = record["settings"]["model"]["method"]
    return {method if isinstance(method, str) else ", ".join(method): record["test"]} | dict(record["baselines"])


def _names(record: Mapping[str, Any]) -> list[str]:
    """The metrics, with the one that the best is chosen by first."""
    first = record["task"]["metric"]
    return [first] + [name for name in record["test"] if name != first]


def _rows(record: Mapping[str, Any]) -> list[list[str]]:
    """The metrics, then the figures of the method and of each baseline, with its name in front."""
    names, all_metrics = _names(record), _all(record)
    digits = {name: _decimals([metrics.get(name) for metrics in all_metrics.values()]) for name in names}
    rows = [
        [row, *(cells.number(metrics.get(name), digits[name]).text for name in names)]
        for row, metrics in all_metrics.items()
    ]
    return [["", *names], *rows]


def _decimals(column: Sequence[float | None]) -> int:
    """The decimals with which the largest figure of a column has four significant digits."""
    largest = max((abs(x) for value in column if (x := cells.known(value))), default=1.0)
    return max(3 - math.floor(math.log10(largest)), 0)
