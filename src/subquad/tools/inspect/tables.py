"""An inspection in the terminal and in Markdown."""

from collections.abc import Callable, Iterator, Sequence
from statistics import median

from rich.console import Console, ConsoleOptions, RenderableType
from rich.text import Text

from subquad.tools.inspect.plots import about
from subquad.tools.inspect.reading import Choice, bounds, choice, choices, mean, over_layers
from subquad.tools.inspect.schema import VARIANTS, Inspected, InspectedShares, InspectReport, Spectrum, Variant
from subquad.tools.report import cells
from subquad.tools.report.cells import MISSING, Cell
from subquad.tools.report.content import Column, Line, ReportTable, text_of
from subquad.tools.report.markup import bullets, escaped, fenced, pairs_table, sections, table_of
from subquad.tools.report.terminal import fits, rich_of

GROUPS: dict[Variant, str] = {"n_b": "N/B", "given": "given"}
SHARES = {
    "size": Column("size", "uneven", "of all buckets, larger than twice or smaller than half the expected size"),
    "size_of_filled": Column("size (filled)", "uneven", "the same of the buckets that are not empty"),
    "ratio": Column("ratio", "uneven", "of all buckets, more than two queries per key or two keys per query"),
    "ratio_of_both": Column("ratio (both)", "uneven", "the same of the buckets with queries and keys"),
}
LEGEND = (
    "utility: share of exact attention's weight on the keys that a query attends to. keys: how many distinct ones. "
    "bound: the most that as many keys can have. N/B: with buckets of N/B tokens, one round; given: with the "
    "method's own settings. uneven: shares of buckets with over twice or under half the expected number of tokens "
    "(size), or with over two queries per key or two keys per query (ratio), when each token goes to the bucket "
    "that it scores highest."
)
SPECTRUM_LEGEND = (
    "Y(j): the share of the j largest singular values of exact attention's weights in the sum of all; over the heads "
    "of a layer, median, least and most. for 90 %: how many singular values hold nine tenths, likewise."
)
BLANK = Cell(MISSING, "missing")


def rich_table(report: InspectReport) -> RenderableType:
    """The means over the layers; laid out by the width that there is when it is printed."""
    return _Terminal(report)


class _Terminal:
    """Settings are below the methods' names if the table would be too wide otherwise."""

    def __init__(self, report: InspectReport):
        self.report = report

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        table = summary(self.report)
        yield Text(title(self.report), "bold")
        full = rich_of(table, False)
        yield full if fits(console, options, full) else rich_of(table, True)
        if self.report.spectrum is not None:
            yield rich_of(spectrum(self.report.spectrum), False)
            yield Text(SPECTRUM_LEGEND, "dim")
        for line in (LEGEND, *self.report.notes):
            yield Text(line, "dim")


def markdown(report: InspectReport, plots: Sequence[str] = ()) -> str:
    """All of an inspection as Markdown. `plots` are the names of the plots that lie next to it."""
    shows = about(report)
    parts = [
        f"# {escaped(title(report))}",
        table_of(summary(report)),
        escaped(LEGEND),
        *(f"![{name}]({name})\n\n{escaped(shows[name])}" for name in plots),
    ]
    if report.spectrum is not None:
        parts += ["## Spectrum", table_of(spectrum(report.spectrum)), escaped(SPECTRUM_LEGEND)]
    parts.append("## Layers")
    for number in report.bounds:
        parts += [f"### Layer {number}", table_of(of_layer(report, number))]
    parts += sections({t: getattr(report, t.lower()) for t in ("Settings", "Model", "Text", "Hardware", "Versions")})
    methods = [(method.method, text_of(method.method, method.settings)) for method in report.methods]
    parts += ["## Methods", pairs_table(methods), "## Notes", bullets(report.notes)]
    parts += ["## Command", fenced(report.command), escaped(report.created)]
    return "\n\n".join(parts) + "\n"


def title(report: InspectReport) -> str:
    """The title of an inspection."""
    name = report.model["name"].rstrip("/").rpartition("/")[2]
    s, layers = report.settings, len(report.bounds)
    sequences = f"{s['sequences']} sequence{'' if s['sequences'] == 1 else 's'} of {s['length']:,} tokens"
    return f"{name}: what methods choose, means over {layers} layer{'' if layers == 1 else 's'}, {sequences}"


# ---------------------------------------------------------------------- tables


def summary(report: InspectReport) -> ReportTable:
    """The means over the layers."""
    means = lambda method, variant: over_layers(list(choices(method, variant).values()))  # noqa: E731
    best = mean(list(bounds(report).values()))
    return _table(report, means, lambda method: method.imbalance, best)


def of_layer(report: InspectReport, number: str) -> ReportTable:
    """The table of one layer."""
    return _table(
        report,
        lambda method, variant: choice(method.layers[number], variant),
        lambda method: method.layers[number].imbalance,
        bounds(report)[int(number)],
    )


def spectrum(measured: Spectrum) -> ReportTable:
    """A line for each layer: how fast the singular values of its heads' weights fall."""
    share = measured.at.index(measured.index)
    heads = [Column(head, group) for group in (f"Y({measured.index})", "for 90 %") for head in ("median", "min", "max")]
    lines = []
    for number, layer in measured.layers.items():
        shares, counts = [curve[share] for curve in layer.curves], layer.needed
        row = [cells.number(statistic(shares)) for statistic in (median, min, max)]
        lines.append(Line(number, [*row, *(cells.number(statistic(counts), 0) for statistic in (median, min, max))]))
    return ReportTable(heads, lines, first="layer")


def _table(
    report: InspectReport,
    chosen: Callable[[Inspected, Variant], Choice | None],
    shares: Callable[[Inspected], InspectedShares | None],
    best: float,
) -> ReportTable:
    """Methods that choose keys or hash, then the upper bound and random buckets."""
    s = report.settings
    heads = [Column(head, GROUPS[variant]) for variant in VARIANTS for head in ("keys", "utility", "bound")]
    lines = []
    for method in report.methods:
        columns = [_choice(chosen(method, variant)) for variant in VARIANTS]
        row = [*columns[0], *columns[1], *_shares(shares(method))]
        if any(cell.tone != "missing" for cell in row):
            name, bracket, mark = method.method.partition(" (")
            lines.append(Line(name, row, [mark.removesuffix(")")] if bracket else []))
    for name, utility in (("upper bound", best), ("random buckets", 1 / s["buckets"])):
        blanks = [BLANK] * (len(heads) - 2 + len(SHARES))
        lines.append(Line(name, [cells.number(s["keys"], 0), cells.number(utility), *blanks]))
    return ReportTable([*heads, *SHARES.values()], lines)


def _choice(choice: Choice | None) -> list[Cell]:
    if choice is None:
        return [BLANK] * 3
    return [cells.number(choice.keys, 0), cells.number(choice.utility), cells.number(choice.bound)]


def _shares(shares: InspectedShares | None) -> list[Cell]:
    if shares is None:
        return [BLANK] * len(SHARES)
    return [cells.share(getattr(shares, name)) for name in SHARES]
