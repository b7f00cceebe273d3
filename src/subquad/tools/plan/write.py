"""Write the files of a plan's report."""

import json
from collections.abc import Mapping
from pathlib import Path

from subquad.tools.plan.plots import drawings, plots
from subquad.tools.plan.schema import PlanReport
from subquad.tools.plan.tables import NEXT, PLOTS, approximate, markdown, metadata_of, tables, title, tried
from subquad.tools.report import layout, terms
from subquad.tools.report.report_files import as_json, write_files
from subquad.tools.report.vector import Drawing


def write_plan_report(report: PlanReport, folder: Path) -> list[Path]:
    """Write report.json, report.md, report.html and the plots next to the plan; return their paths."""
    drawn = plots(report)
    where = json.dumps(folder.as_posix(), ensure_ascii=False)  # as the user named it, from where the command ran
    page = html(report, drawings(report), f"plan = sq.load_plan({where})\nsq.hf.swap(model, plan)")
    contents = {
        "report.md": markdown(report, list(drawn)).encode(),
        **drawn,
        "report.html": page.encode(),
        "report.json": as_json(report),
    }
    return write_files(contents, folder, stale=PLOTS)


def html(report: PlanReport, drawn: Mapping[str, Drawing], use: str) -> str:
    """The page. `drawn` are SVGs, as `plots.drawings` returns them; `use` are the lines that run the plan."""
    all_tables = tables(report)
    return layout.page(
        "plan/page.html.j2",
        drawn,
        title=title(report),
        report=report,
        use=use,
        next=NEXT,
        approximate=approximate(report),
        tried=tried(report),
        figures=layout.shown(PLOTS, drawn),
        tables=all_tables,
        facts=metadata_of(report),
        glossary=terms.glossary({*layout.heads(table for _, _, table in all_tables), *terms.PLANNED}),
        methods=terms.described(_methods(report)),
    )


def _methods(report: PlanReport) -> list[str]:
    """The methods that the plan or its tables name."""
    chosen = [layer.method for planned in report.lengths for layer in planned.layers.values()]
    alone = [planned.uniform.method for planned in report.lengths if planned.uniform is not None]
    return [*chosen, *alone]
