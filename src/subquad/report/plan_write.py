"""Write the files of a plan's report."""

from pathlib import Path

from subquad.report.files import as_json, write_files
from subquad.report.page import shown, style, template
from subquad.report.plan_plots import plots
from subquad.report.plan_schema import PlanReport
from subquad.report.plan_tables import FIGURES, facts_of, markdown, tables, title


def write_plan_report(report: PlanReport, folder: Path) -> list[Path]:
    """Write report.json, report.md, report.html and the plots beside the plan; return their paths."""
    drawn = plots(report)
    page = template("plan.html.j2").render(
        style=style(),
        title=title(report),
        report=report,
        use=f'plan = sq.load_plan("{folder.name}")\nsq.hf.swap(model, plan)',
        figures=shown(FIGURES, drawn),
        tables=tables(report),
        facts=facts_of(report),
    )
    contents = {
        "report.md": markdown(report, list(drawn)).encode(),
        **drawn,
        "report.html": page.encode(),
        "report.json": as_json(report),
    }
    return write_files(contents, folder, stale=FIGURES)
