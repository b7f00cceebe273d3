"""The columns of a comparison's tables, and the texts next to them, for the terminal, Markdown and the page."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from subquad.core.spelling import listed
from subquad.tools.compare.reading import (
    fidelity,
    floor_figure,
    layer_errors,
    marks,
    min_fidelity,
    model_length,
    model_lengths,
    op_lengths,
    quality,
    ran,
)
from subquad.tools.compare.schema import MethodReport, Part, Report
from subquad.tools.report.cells import MISSING, Cell, decimals, kept, known, number, size, speedup, two_digits
from subquad.tools.report.content import Column, Line, ReportTable, sections_of

PLOTS = {
    "quality-vs-speed.png": (
        "Fidelity against speed-up",
        "Each method's fidelity to the exact model against the speed-up of a whole forward pass, a panel for each "
        "length. Exact attention is at 1× and fidelity 1; the line is the Pareto front. "
        "Hollow marks are within the noise, neither faster nor slower; the grey band is how far exact attention "
        "differs from itself.",
    ),
    "model-time-vs-length.png": (
        "Time of a forward pass against length",
        "Seconds of a forward pass of the whole model against the number of tokens, both logarithmic, in the dtype "
        "that was run at the longest length. Dashed lines are predicted from the two longest lengths. A ring marks the "
        "length from which on an approximation is faster than the fastest exact attention.",
    ),
    "error-by-layer.png": (
        "Error of each layer's attention",
        "Relative error of the attention output of each layer, a line for each method; lower is closer to exact.",
    ),
    "time-vs-length.png": (
        "Time of one attention call against length",
        "Time of one layer's attention against the number of tokens, both logarithmic. A ring marks the length from "
        "which on a method is faster than exact attention, beyond the noise. The inputs are random, so these times "
        "have no fidelity.",
    ),
}
NEXT = "Next, search settings layer by layer, for this model and text."
REQUESTS = "Whole requests"
OP_NOTE = "One layer's attention alone, on random inputs; these times have no fidelity."


# ---------------------------------------------------------------------- tables

Maker = tuple[Column, Callable[[MethodReport], Cell]]


def _table(report: Report, makers: Sequence[Maker]) -> ReportTable:
    lines = [Line(m.method, [make(m) for _, make in makers], marks(report, m)) for m in ran(report)]
    return ReportTable([column for column, _ in makers], lines).dense()


def quality_table(report: Report) -> ReportTable:
    """The quality of the methods at the model's own length."""
    length = model_length(report)
    return _table(report, [_nearness(report, length), *_quality_details(length)])


def task_table(report: Report) -> ReportTable:
    """The scores of the labelled task; no columns where there was none."""
    return _table(report, _task(report))


def speed_table(report: Report) -> ReportTable:
    """Fidelity and speed-up of the methods at each length, and memory."""
    makers: list[Maker] = []
    for length in model_lengths(report):
        makers += [_fidelity(length, min_fidelity(report)), _speed(length), _over_fp32(length)]
        makers.append(_memory(report, length, group=tokens(length)))
    return _table(report, [(_of_batches(report, column), make) for column, make in makers])


def main_table(report: Report) -> ReportTable:
    """Fidelity and speed-up at each length, the task, and the other quality figures at the model's own length."""
    details = _table(report, _quality_details(model_length(report)))
    tables = (speed_table(report), task_table(report), details)
    lines = [
        Line(parts[0].name, [cell for part in parts for cell in part.cells], parts[0].marks)
        for parts in zip(*(table.lines for table in tables), strict=True)
    ]
    return ReportTable([column for table in tables for column in table.columns], lines)


def model_table(report: Report) -> ReportTable:
    """Every figure of whole forward passes, by length."""
    makers: list[Maker] = []
    for length in model_lengths(report):
        makers += [_nearness(report, length, tokens(length)), *_spread_of_nearness(length, tokens(length))]
        makers += [_time(report, "model", length), _range(report, "model", length), _speed(length), _over_fp32(length)]
        makers.append(_rate(report, length))
        makers.append(_memory(report, length, group=tokens(length)))
    named = [(_of_batches(report, column), make) for column, make in makers]
    return _table(report, [(replace(column, group=f"{column.group} tokens"), make) for column, make in named])


def _of_batches(report: Report, column: Column) -> Column:
    """The column with the mean length of its texts, if batches were padded: a length is then the longest text's."""
    lengths = {tokens(length): length for length in model_lengths(report)}
    mean = mean_length(report, lengths[column.group])
    return column if mean is None else replace(column, group=f"{column.group} (mean {mean:,.0f})")


def mean_length(report: Report, length: str) -> float | None:
    """The mean number of tokens of the texts in padded batches; None if each text had the whole length."""
    batch: int = report.settings.get("batch") or 1
    in_batch: Mapping[str, float] = report.settings.get("batch_tokens") or {}
    return in_batch[length] / batch if batch > 1 and length in in_batch else None


def request_table(report: Report) -> ReportTable:
    """Time to the first token, time of each one after it, and of the whole request, by length; of causal models."""
    makers: list[Maker] = []
    requests = report.requests
    for length in model_lengths(report):
        if requests is not None and any(length in (m.request or {}) for m in ran(report)):
            n, new = tokens(length), f"{requests.new_tokens:,}"
            prompt = f"{requests.prompts[length]:,}"
            first = [_time(report, "model", length), _speed(length)]
            step = [_time(report, "step", length), _speed(length, "step")]
            whole = [_request_time(report, length), _speed(length, "request"), _over_fp32(length, "request")]
            whole.append(_memory(report, length, "request"))
            groups = {f"{n}: first token": first, f"{n}: each further token": step}
            groups[f"{prompt} + {new}: request"] = whole
            makers += [(replace(c, group=group), make) for group, made in groups.items() for c, make in made]
    return _table(report, makers)


def _request_time(report: Report, length: str) -> Maker:
    values = [ms / 1e3 for m in ran(report) if (ms := known(m.cost("request", length).ms)) is not None]
    digits = max(map(decimals, values), default=0)

    def seconds(method: MethodReport) -> Cell:
        ms = known(method.cost("request", length).ms)
        return size(None if ms is None else ms / 1e3, digits)

    return Column("seconds"), seconds


def requests_caption(report: Report) -> str:
    """Explains what a request generates, which steps are exact, and the cache's size; empty if no steps were timed."""
    requests = report.requests
    if requests is None:
        return ""
    sizes = [
        f"{size(mib).text} MiB in {dtype} after {tokens(length)}"
        for length, by_dtype in requests.cache_mib.items()
        for dtype, mib in by_dtype.items()
    ]
    return (
        f"A request generates {requests.new_tokens:,} tokens: the prefill gives the first, and each further one is "
        f"a step on the cache. {requests.steps} Keys and values: {', '.join(sizes)} tokens."
    )


def op_table(report: Report) -> ReportTable:
    """Time of one attention call, and its speed-up, by length."""
    makers: list[Maker] = [(Column("faster from"), crossover)]
    for length in op_lengths(report):
        makers += [_time(report, "op", length), _speed(length, "op")]
    return _table(report, makers)


def crossover(method: MethodReport) -> Cell:
    """The length from which on a method is clearly faster: "3,100", "≤512" (measured, maybe less) or "none" seen."""
    if method.crossover is None and method.status != "exact":
        return Cell("none", "slower", math.inf)
    x = known(method.crossover)
    if x is None or method.status == "exact":
        return Cell(MISSING, "missing")
    measured = sorted(map(int, method.op or {}))
    if not measured or x <= measured[0]:
        return Cell(f"≤{next(iter(measured), 0):,}", "faster", x)
    return Cell(f"≤{x:,.0f}" if x in measured else f"{two_digits(x):,}", value=x)


def op_memory_table(report: Report) -> ReportTable:
    """Peak extra memory of one attention call, by length."""
    return _table(report, [_memory(report, length, "op", head=tokens(length)) for length in op_lengths(report)])


def layer_table(report: Report) -> ReportTable:
    """Relative error of each layer's attention output."""
    numbers = sorted({layer for method in ran(report) for layer in layer_errors(method)})
    mean: Maker = (Column("mean", named="layer error"), lambda m: number(_mean(layer_errors(m).values())))
    return _table(report, [mean, *map(_error_of, numbers)])


def _error_of(layer: int) -> Maker:
    return Column(str(layer), "layer", named="layer error"), lambda m: number(layer_errors(m).get(layer))


def _nearness(report: Report, length: str, group: str = "") -> Maker:
    """The mean cosine, or the fidelity of language models, which have none."""
    least = min_fidelity(report)
    if _has_cosines(report):
        return Column("cosine mean", group), lambda m: kept(quality(m, length).cosine_mean, least)
    return Column("fidelity", group), lambda m: kept(fidelity(m, length), least)


def _spread_of_nearness(length: str, group: str = "") -> list[Maker]:
    """The other columns about closeness to exact attention at a length."""
    return [
        _of_quality(Column("cosine p5", group), "cosine_p5", length, 4),
        _of_quality(Column("relative error", group, short="rel. error"), "relative_error", length, 4),
        _of_quality(Column("perplexity", group), "perplexity", length, 2),
        _of_quality(Column("KL", group), "kl", length, 5),
        _of_quality(Column("same top token", group, short="same top"), "agreement", length, 4),
        _of_quality(Column("KL, last quarter", group, short="KL, last ¼"), "kl_last_quarter", length, 5),
        _of_quality(
            Column("same top token, last quarter", group, short="same, last ¼"), "agreement_last_quarter", length, 4
        ),
    ]


def _of_quality(column: Column, figure: str, length: str, digits: int = 3) -> Maker:
    return column, lambda m: number(getattr(quality(m, length), figure), digits)


def _quality_details(length: str) -> list[Maker]:
    """The spread, the errors inside of the model, and the ranking of passages."""
    return [
        *_spread_of_nearness(length),
        (Column("layer error"), lambda m: number(_mean(layer_errors(m).values()))),
        _of_quality(Column("weights L1", short="weight L1"), "weights_l1", length),
        _of_quality(Column("top-1"), "top1", length),
        _of_quality(Column("recall@10", short="rec. @10"), "recall10", length),
    ]


def _has_cosines(report: Report) -> bool:
    return any(known(quality(m, n).cosine_mean) is not None for m in ran(report) for n in model_lengths(report))


def _task(report: Report) -> list[Maker]:
    metrics = dict.fromkeys(metric for method in ran(report) for metric in method.task or {})
    name = (report.task or {}).get("name", "task")
    return [_metric(name, metric) for metric in metrics]


def _metric(name: str, metric: str) -> Maker:
    return Column(metric, name, named="task score"), lambda m: number((m.task or {}).get(metric))


def _speed(length: str, part: Part = "model") -> Maker:
    column = Column("speed-up", tokens(length), short="speed")

    def make(method: MethodReport) -> Cell:
        costs = method.cost(part, length)
        return speedup(costs.speedup, costs.verdict)

    return column, make


def _fidelity(length: str, least: float | None) -> Maker:
    column = Column("fidelity", tokens(length), short="fidel.")
    return column, lambda m: kept(fidelity(m, length), least)


def _time(report: Report, part: Part, length: str) -> Maker:
    digits = _decimals(report, part, length, "ms")
    return Column("ms", tokens(length)), lambda m: size(m.cost(part, length).ms, digits)


def _over_fp32(length: str, part: Part = "model") -> Maker:
    """The speed-up of a row in 16 bits over exact attention in fp32."""

    def make(method: MethodReport) -> Cell:
        costs = method.cost(part, length)
        return speedup(costs.speedup_fp32, costs.verdict_fp32)

    return Column("over fp32", tokens(length), short="fp32"), make


def _rate(report: Report, length: str) -> Maker:
    """Tokens, without padding, that are read in a second."""
    in_batch = (report.settings.get("batch_tokens") or {}).get(length, int(length))

    def rate(method: MethodReport) -> Cell:
        ms = known(method.cost("model", length).ms)
        return size(1e3 * in_batch / ms if ms else None, 0)

    return Column("tokens/s", tokens(length)), rate


def _range(report: Report, part: Part, length: str) -> Maker:
    digits = _decimals(report, part, length, "ms_low", "ms_high")

    def quartiles(method: MethodReport) -> Cell:
        costs = method.cost(part, length)
        low, high = (size(getattr(costs, name), digits) for name in ("ms_low", "ms_high"))
        return low if low.tone == "missing" else Cell(f"{low.text} to {high.text}", value=low.value)

    return Column("quartiles", tokens(length)), quartiles


def _memory(report: Report, length: str, part: Part = "model", head: str = "extra MiB", group: str = "") -> Maker:
    digits = _decimals(report, part, length, "extra_mib")
    return Column(head, group, named="extra MiB"), lambda m: size(m.cost(part, length).extra_mib, digits)


def _decimals(report: Report, part: Part, length: str, *metrics: str) -> int:
    """The number of decimals of a column of sizes: those of the smallest one."""
    values = [getattr(method.cost(part, length), figure) for method in ran(report) for figure in metrics]
    return max(map(decimals, values), default=0)


def _mean(values: Iterable[float]) -> float | None:
    listed = list(values)
    return sum(listed) / len(listed) if listed else None


def tokens(length: str) -> str:
    """Format a length as text."""
    return f"{int(length):,}"


# ---------------------------------------------------------------------- facts


def short_name(report: Report) -> str:
    """The model's name without the folder or organisation that it lies in."""
    return str(report.model.get("name") or "model").rstrip("/").rpartition("/")[2]


def use(report: Report) -> str | None:
    """Python that loads the model with the recommended methods; None if exact attention is recommended."""
    return report.recommendation.code


def legend(report: Report) -> str:
    """The legend of the main table: its columns, and what a speed-up of 1 is."""
    length, least = model_length(report), min_fidelity(report)
    lines = [
        f"≈ within the noise of this run, neither faster nor slower; ↓ slower than exact attention; {MISSING} not "
        "measured; lengths in tokens.",
        _padding(report),
        _samples(report),
        f"Minimum fidelity: {least:.5g}." if least is not None else "",
        _without_attention(report),
        f"Quality figures without a length are for {tokens(length)} tokens." if length else "",
        _exact_times(report),
        _eager(report),
    ]
    return " ".join(filter(None, lines))


def _padding(report: Report) -> str:
    """The meaning of a length if batches were padded."""
    means = [
        f"{mean:,.0f} at {tokens(n)}" for n in model_lengths(report) if (mean := mean_length(report, n)) is not None
    ]
    batch = report.settings.get("batch")
    return f"Batches of {batch} texts, padded; their mean number of tokens is {listed(means)}." if means else ""


def _without_attention(report: Report) -> str:
    """The bottom of the scale of fidelities."""
    figure = {"kl": "kl", "agreement": "agreement"}.get(floor_figure(report))
    keys = (figure,) if figure else ("cosine_mean", "of_exact")
    each = [
        f"{math.exp(-value) if figure == 'kl' else value:.4f} at {tokens(length)}"
        for length, quality in (report.without_attention or {}).items()
        for key in keys
        if (value := known(getattr(quality, key))) is not None
    ]
    return f"Fidelity of the model without attention: {', '.join(each)} tokens." if each else ""


def _samples(report: Report) -> str:
    """The definition of fidelity, and the number of texts over which it is a mean."""
    what = {
        "kl": "e^−KL of next tokens, exact against this",
        "agreement": "the share of positions with the exact top token",
    }.get(floor_figure(report)) or (
        "the mean cosine to the exact embeddings" if _has_cosines(report) else "the exact perplexity / this one's"
    )
    passages, sequences = (report.settings.get(name) for name in ("passages", "sequences"))
    model_tokens = model_length(report)
    counts = [f"{passages} passages at {tokens(model_tokens)}"] if model_tokens and passages is not None else []
    counts += [
        f"{count} sequence{'' if count == 1 else 's'} at {tokens(length)}"
        for length, count in (sequences or {}).items()
    ]
    return f"Fidelity: {what}{', over ' if counts else ''}{', '.join(counts)}."


def _exact_times(report: Report) -> str:
    exact = next((method for method in ran(report) if method.status == "exact"), None)
    times = {n: size(exact.cost("model", n).ms) for n in model_lengths(report)} if exact else {}
    listed = [f"{time.text} ms at {tokens(n)}" for n, time in times.items() if time.tone != "missing"]
    return f"A forward pass with exact attention: {', '.join(listed)}." if listed else ""


def _eager(report: Report) -> str:
    """Time and memory of exact attention as eager code."""
    listed = [
        f"{size(eager.ms).text} ms and {size(eager.extra_mib).text} extra MiB at {tokens(length)}"
        for length, eager in (report.eager or {}).items()
    ]
    return f"With eager attention: {', '.join(listed)}." if listed else ""


def summary_sections(report: Report) -> list[tuple[str, list[tuple[str, str]]]]:
    """(heading, [(name, value)]) of everything that the figures depend on."""
    titles = ("Model", "Text", "Task", "Settings", "Hardware", "Versions")
    return sections_of({title: getattr(report, title.lower()) or {} for title in titles})
