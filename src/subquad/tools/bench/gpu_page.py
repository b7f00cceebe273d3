"""The sheet of a GPU as Markdown, from its plain data: times with the model's predictions, and tried tiles."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from subquad.tools.bench.gpu_sheet import NO_TIME
from subquad.tools.report.cells import significant
from subquad.tools.report.markup import escaped, fenced, pairs_table, rows_of

Cell = Mapping[str, Any]
NONE = "–"
BASELINES = {"full": "SDPA (flash)", "cudnn": "SDPA (cuDNN)"}
HEAD = (
    *("method", "tokens", "eager, ms", "graph, ms", "eager speed-up", "graph speed-up", "peak MiB", "fidelity"),
    *("model: eager, ms", "model: graph, ms", "graph, of the model's"),
)


def markdown(sheet: Mapping[str, Any], command: str) -> str:
    """All of the sheet."""
    plan = sheet["plan"]
    parts = [
        f"# {sheet['gpu']} ({sheet['architecture']}): methods and kernels",
        f"{plan['heads']} heads in all, {plan['dtype']}, standard normal inputs; medians. The speed-up is over SDPA "
        "with its flash kernel, timed the same way. The fidelity is the mean cosine of outputs to SDPA's: on normal "
        "inputs, which have no structure that a method could use, it is lower than on a model's.",
        *_tables(sheet["cells"]),
        "## Tiles",
        *_tiles(sheet),
        "## Machine",
        pairs_table([*sheet["hardware"].items(), *sheet["versions"].items(), ("seconds", f"{sheet['seconds']:.0f}")]),
        "## Command",
        fenced(command),
    ]
    return "\n\n".join(parts) + "\n"


def _tables(cells: Sequence[Cell]) -> Iterator[str]:
    """One for each of the passes at each width, with why cells are empty below it."""
    panels = dict.fromkeys((cell["causal"], cell["passes"], cell["width"]) for cell in cells)
    for causal, passes, width in panels:
        chosen = [cell for cell in cells if (cell["causal"], cell["passes"], cell["width"]) == (causal, passes, width)]
        unmeasured = sorted({cell["length"] for cell in chosen if cell["reason"] == NO_TIME})
        chosen = [cell for cell in chosen if cell["reason"] != NO_TIME]
        order = list(dict.fromkeys(cell["method"] for cell in chosen))
        chosen.sort(key=lambda cell: (order.index(cell["method"]), cell["length"]))
        yield f"## {'causal ' * causal}{passes}, D={width}"
        if chosen:
            yield rows_of([HEAD, *map(_line, chosen)])
        if unmeasured:
            yield f"Not measured, because no time was left: {', '.join(f'{length:,}' for length in unmeasured)} tokens."
        reasons = dict.fromkeys((cell["method"], cell["reason"]) for cell in chosen if cell["reason"])
        if reasons:
            yield pairs_table(list(reasons))


def _line(cell: Cell) -> list[str]:
    measured, predicted = cell["graph_ms"], cell["predicted_graph_ms"]
    return [
        BASELINES.get(cell["method"]) or f"`{cell['method']}`",
        f"{cell['length']:,}",
        *(_number(cell[what]) for what in ("eager_ms", "graph_ms")),
        *(_number(cell[what], "×") for what in ("eager_speedup", "graph_speedup")),
        NONE if cell["peak_mib"] is None else f"{cell['peak_mib']:,.0f}",
        NONE if cell["fidelity"] is None else f"{cell['fidelity']:.3f}",
        *(_number(cell[what]) for what in ("predicted_eager_ms", "predicted_graph_ms")),
        _number(measured / predicted if measured and predicted else None, "×"),
    ]


def _number(value: float | None, unit: str = "") -> str:
    return NONE if value is None else f"{significant(value)}{unit}"


def _tiles(sheet: Mapping[str, Any]) -> Iterator[str]:
    """The tiles that were tried, and the entries to paste into `kernels/triton/tiles.py`."""
    if not sheet["tiles"]:
        yield "None were tried: no time was left, or no kernel with a table was launched."
        return
    yield "Rows, keys, warps and stages of each kernel; the first of each are those in use."
    head = ("kernel", "D", "tiles", "ms", "")
    rows = (
        [f"`{t['kernel']}`", str(t["width"]), str(tuple(t["tiles"])), _number(t["ms"]), escaped(t["reason"] or "")]
        for t in sheet["tiles"]
    )
    yield rows_of([head, *rows])
    yield "The fastest, as an entry of `MEASURED` in `src/subquad/kernels/triton/tiles.py`:"
    entries = (
        f'        ("{t["kernel"]}", {t["bytes"]}, {t["width"]}): Tiles{tuple(t["tiles"])},' for t in sheet["fastest"]
    )
    yield fenced("\n".join([f'    "{sheet["architecture"]}": {{', *entries, "    },"]), "python")
