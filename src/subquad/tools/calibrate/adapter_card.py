"""The card of an adapter: what was fitted, on what, and how well it did, in Markdown and on the terminal."""

from typing import Any

from rich.console import Group
from rich.text import Text

from subquad.tools.report.markup import rows_of
from subquad.tools.report.terminal import plain_table

TITLES = {
    "error": "relative error of the outputs",
    "utility": "attention utility, buckets of N/B",
    "keys": "distinct keys per query, buckets of N/B",
}

CARD = """# {method} for {model}

Learned parameters of subquad's `{method}` attention, fitted to the frozen model {model} on plain text. The model itself
is unchanged and not in this folder.

```python
import subquad as sq

sq.hf.load_adapter(model, "{folder}")
```

{facts}

Before and after, on the held-out passages:

{table}
"""


def metrics_of(record: dict[str, Any]) -> list[str]:
    """The figures that every measurement has, those with a title."""
    return [name for name in TITLES if all(name in layer for layer in record["history"][0]["layers"].values())]


def layer_rows(record: dict[str, Any]) -> list[list[str]]:
    """One row per layer, "before → after" for each figure, and the means; after is where the layer did best."""
    names = metrics_of(record)
    at = {entry["step"]: entry["layers"] for entry in record["history"]}
    first = record["history"][0]["step"]
    pairs = {
        number: [(at[first][number][name], at[step][number][name]) for name in names]
        for number, step in record["best"].items()
    }
    rows = [[number, *map(_arrow, pair)] for number, pair in pairs.items()]
    before_and_after = (zip(*layers, strict=True) for layers in zip(*pairs.values(), strict=True))  # of each figure
    means = [(sum(before) / len(pairs), sum(after) / len(pairs)) for before, after in before_and_after]
    return [*rows, ["mean", *map(_arrow, means)]]


def rich_record(record: dict[str, Any]) -> Group:
    """The record of a fit for a terminal: the layers' figures, the layers that were left out, and why it ended."""
    lines = [f"layer {number} was left exact: {reason}" for number, reason in record.get("refused", {}).items()]
    lines += [untouched(record)] if untouched(record) else []
    lines.append(f"{record['ended']}, {record['seconds']:.0f} s")
    return Group(plain_table(_header(record), layer_rows(record)), *map(Text, lines))


def _header(record: dict[str, Any]) -> list[str]:
    return ["layer", *(TITLES[name] for name in metrics_of(record))]


def adapter_card(record: dict[str, Any], folder: str) -> str:
    """The card in Markdown."""
    method, passages, settings = record["method"], record["passages"], record["settings"]
    listed = ", ".join(f"`{name}={value}`" for name, value in method.items() if name != "name")
    items = [
        f"Settings: {listed}.",
        f"Text: {', '.join(record['text']['source'])} ({record['text']['documents']} documents), passages of at most "
        f"{passages['tokens']:,} tokens. {passages['held_out']} of them were held out; the figures below are theirs.",
        f"{record['history'][-1]['step']} steps of {settings['batch']}, {record['seconds']:.0f} s ({record['ended']}), "
        f"Adam from {settings['learning_rate']:g} down to a tenth, seed {settings['seed']}. Each layer has the "
        f"parameters with which its {record['metric']} was best.",
    ]
    items += [untouched(record)] if untouched(record) else []
    items += record["notes"]
    return CARD.format(
        method=method["name"],
        model=record["model"],
        folder=folder,
        facts="\n".join(f"- {item}" for item in items),
        table=rows_of([_header(record), *layer_rows(record)]),
    )


def untouched(record: dict[str, Any]) -> str:
    """The positions that no passage reached, for parameters that belong to positions; "" where there are none."""
    reached, most = record["passages"]["tokens"], record.get("longest", 0)
    if most <= reached:
        return ""
    return (
        f"The parameters are for at most {most:,} tokens, and no passage was longer than {reached:,}: parameters of "
        f"later positions have their initial values. Fit on passages of {most:,} tokens to use the method there."
    )


def _arrow(pair: tuple[float, float]) -> str:
    digits = 3 if max(pair) < 10 else 0
    return " → ".join(f"{x:.{digits}f}" for x in pair)
