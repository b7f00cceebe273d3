"""A plan in the terminal and in Markdown."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from subquad.hf.plans import batches_in_words
from subquad.methods.full import EXACT
from subquad.tools.plan.schema import PlannedLength, PlanReport
from subquad.tools.report import cells
from subquad.tools.report.cells import MISSING, Cell
from subquad.tools.report.content import Column, Line, ReportTable, sections_of
from subquad.tools.report.markup import bullets, escaped, fenced, sections, table_of
from subquad.tools.report.terminal import rich_of

BLANK = Cell(MISSING, "missing")
NEXT = "Next, compare the plan with other methods on the same text, at the lengths at which it is not exact attention."
PLOTS = {
    "plan-layers.png": (
        "Method of each layer",
        "The method of each layer at each length; squares without a colour are exact attention. The number is the "
        "share of exact attention's time in that layer.",
    ),
    "plan-front.png": (
        "Plans for other floors",
        "Predicted speed-up of the whole model for several floors of the fidelity, from the same measurements: plans, "
        "and the best single method in all layers.",
    ),
}
SECTIONS = {"Settings": "settings", "Model": "model", "Text": "text", "Hardware": "hardware", "Versions": "versions"}


def title(report: PlanReport) -> str:
    """The title of the report."""
    name = str(report.model.get("name", report.model.get("class", "model"))).rstrip("/").rpartition("/")[2]
    return f"{name}: attention plan"


def rich_table(report: PlanReport) -> RenderableType:
    """Headline and tables, for a terminal."""
    parts: list[RenderableType] = [Text(title(report), "bold")]
    shown = (verified(report), requests(report), layers(report))
    parts += [rich_of(table, False) for table in shown if table.columns and table.lines]
    parts.append(Text(report.headline, "bold"))
    if any(planned.batches is not None for planned in report.lengths):
        parts += map(Text, tried(report))
    parts += [Text(note, "dim") for note in report.notes]
    if report.next is not None:
        parts += [Text(NEXT), Text(report.next)]
    return Group(*parts)


def markdown(report: PlanReport, plot_names: Sequence[str] = ()) -> str:
    """All of a plan as Markdown. `figures` are the names of the plots that lie next to it."""
    parts = [f"# {escaped(title(report))}", f"**{escaped(report.headline)}**", bullets(tried(report))]
    if report.next is not None:
        parts += [NEXT, fenced(report.next)]
    for heading, about, table in tables(report):
        parts += [f"## {heading}", escaped(about), table_of(table)]
    parts += [f"![{head}]({name})\n\n{about}" for name, (head, about) in PLOTS.items() if name in plot_names]
    parts += sections(described(report))
    parts += ["## Notes", bullets(report.notes), "## Command", fenced(report.command), escaped(report.created)]
    return "\n\n".join(part for part in parts if part) + "\n"


def tried(report: PlanReport) -> list[str]:
    """The candidates and passages that the plan was chosen from and verified on, a sentence for each length."""
    sentences = []
    for planned in report.lengths:
        length, noun = f"{planned.length:,} tokens", "passages"
        if planned.batches is not None:
            length, noun = f"{length} ({batches_in_words(vars(planned.batches))})", "batches"
        if (least := planned.least_seconds) is not None:
            sentences.append(f"{length}: nothing was decided, which takes about {least:,.0f} seconds at least.")
            continue
        text = f"{length}: {planned.tried} candidates were tried"
        text += f" on {planned.passages} {noun}" if planned.passages else ", and none was faster than exact attention"
        if planned.verified is not None:
            text += f", and the plan was verified on {planned.verified.passages} held-out {noun}"
        sentences.append(f"{text}.")
    return sentences


def tables(report: PlanReport) -> list[tuple[str, str, ReportTable]]:
    """(heading, description, table) of all tables with lines."""
    all_tables = [
        (
            "Lengths",
            "Figures on held-out passages. The predicted loss is the sum of the losses of single layers.",
            verified(report),
        ),
        (
            "Whole requests",
            "Time to the first new token, of each further one, and of the whole request, exact and with the plan.",
            requests(report),
        ),
        (
            "Layers",
            "The method of each layer, with its share of exact attention's time, its loss alone and the relative error "
            "of the layer's output.",
            layers(report),
        ),
        ("Other floors", "Predictions from the same measurements, not verified.", floors(report)),
        ("Rounds", "Each choice that was verified, in order.", rounds(report)),
    ]
    return [(heading, about, table) for heading, about, table in all_tables if table.lines and table.columns]


def described(report: PlanReport) -> dict[str, dict[str, object]]:
    """Settings and the like by heading."""
    return {heading: getattr(report, name) for heading, name in SECTIONS.items()}


def metadata_of(report: PlanReport) -> list[tuple[str, list[tuple[str, str]]]]:
    """The facts behind a plan as (heading, [(name, text)])."""
    return [(heading, list(pairs)) for heading, pairs in sections_of(described(report))]


def verified(report: PlanReport) -> ReportTable:
    """A line for each length: fidelity, its bound, speed, and the best single method for comparison."""
    columns = [
        Column("fidelity", "plan"),
        Column("lower bound", "plan"),
        Column("speed-up", "plan"),
        Column("predicted loss", "plan"),
        Column("loss", "plan"),
        Column("method", "best single method"),
        Column("fidelity", "best single method"),
        Column("speed-up", "best single method"),
    ]
    lines = [Line(f"{p.length:,} tokens", _verified(p)) for p in report.lengths]
    return ReportTable(columns, lines, first="length").dense()


def _verified(planned: PlannedLength) -> list[Cell]:
    mine = [BLANK] * 5
    if (of_plan := planned.verified) is not None:
        mine = [
            cells.number(1 - of_plan.loss, 4),
            cells.number(1 - of_plan.bound, 4),
            cells.speedup(of_plan.speedup),
            cells.number(of_plan.predicted, 4),
            cells.number(of_plan.loss, 4),
        ]
    if (best := planned.uniform) is None:
        return [*mine, BLANK, BLANK, BLANK]
    fidelity = None if best.loss is None else 1 - best.loss
    return [*mine, Cell(best.method), cells.number(fidelity, 4), cells.speedup(best.speedup)]


def requests(report: PlanReport) -> ReportTable:
    """A line for each length with requests: exact attention and the plan; first token, each further one, and all."""
    times = ("first_ms", "step_ms", "ms")
    heads = ("first token, ms", "further token, ms", "request, ms")
    columns = [Column(head, group) for group in ("exact attention", "plan") for head in heads]
    columns += [Column(head, "speed-up") for head in ("first token", "further token", "request")]
    lines = []
    for p in report.lengths:
        if (measured := p.requests) is None or p.verified is None:
            continue
        cell = [cells.size(getattr(row, name)) for row in (measured.exact, measured.plan) for name in times]
        speeds = (p.verified.speedup, measured.step_speedup, measured.speedup)
        lines.append(Line(f"{p.length:,} + {measured.new_tokens:,} tokens", [*cell, *map(cells.speedup, speeds)]))
    return ReportTable(columns, lines, first="length")


def layers(report: PlanReport) -> ReportTable:
    """A line for each layer; what runs at each length."""
    heads = ("method", "time", "loss", "layer error")
    columns = [Column(head, f"{p.length:,} tokens") for p in report.lengths for head in heads]
    numbers = list(dict.fromkeys(number for p in report.lengths for number in p.layers))
    lines = [Line(number, [cell for p in report.lengths for cell in _layer(p, number)]) for number in numbers]
    return ReportTable(columns, lines, first="layer").dense()


def approximate(report: PlanReport) -> list[str]:
    """The numbers of the layers that run something else than exact attention, at any length."""
    layers = [pair for planned in report.lengths for pair in planned.layers.items()]
    return list(dict.fromkeys(number for number, layer in layers if layer.method != EXACT))


def _layer(planned: PlannedLength, number: str) -> list[Cell]:
    layer = planned.layers.get(number)
    if layer is None or layer.method == EXACT:
        return [Cell("exact", "tie"), BLANK, BLANK, BLANK]
    measured = cells.share(layer.time), cells.number(layer.loss, 4), cells.number(layer.error, 3)
    return [Cell(layer.method), *measured]


def floors(report: PlanReport) -> ReportTable:
    """A line for each length and floor."""
    columns = [Column("loss"), Column("speed-up"), Column("best single method"), Column("its speed-up")]
    lines = [
        Line(
            f"{p.length:,} tokens, {f.floor:g}",
            [
                cells.number(f.loss, 4),
                cells.speedup(f.speedup),
                Cell(f.uniform) if f.uniform else BLANK,
                cells.speedup(f.uniform_speedup) if f.uniform else BLANK,
            ],
        )
        for p in report.lengths
        for f in p.floors
    ]
    return ReportTable(columns, lines, first="length, floor").dense()


def rounds(report: PlanReport) -> ReportTable:
    """A line for each choice that was verified."""
    columns = [Column("predicted loss"), Column("loss"), Column("upper bound"), Column("speed-up"), Column("passages")]
    lines = [
        Line(
            f"{p.length:,} tokens, {i + 1}",
            [
                cells.number(r.predicted, 4),
                cells.number(r.loss, 4),
                cells.number(r.bound, 4),
                cells.speedup(r.speedup),
                cells.number(r.passages, 0),
            ],
        )
        for p in report.lengths
        for i, r in enumerate(p.rounds)
    ]
    return ReportTable(columns, lines, first="length, round")
