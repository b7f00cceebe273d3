"""The published figures of `subquad compare`: its default run, one with longer positions, and one in the demo encoder.

    python benchmarks/compare_default.py [NOVEL.txt …] [--runs "demo-decoder longer demo-encoder"]

compares, on the default text, the default rows in the demo decoder; the closest ones in bf16 at up to 16,384 tokens,
with positions extended by YaRN; and the default rows in fp32 in the demo encoder. With texts, rows of the encoder are
also `lha:buckets=4` and `lha-tail` fitted on them. It writes the reports to `benchmarks/results/`, plots to
`docs/results/` (time against length of the longer run, fidelity against speed of the encoder), and the table of the
encoder's rows to the page there, between marks. Run it alone on the machine: if a report says that the machine was
busy, it is not written unless `--busy` is given. An interrupted run resumes.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import sheet
import typer

from subquad.tools.compare.plots import plots
from subquad.tools.compare.printed import markdown
from subquad.tools.compare.schema import Report
from subquad.tools.compare.settings import COMPARED, COMPARED_LONG
from subquad.tools.report import cells
from subquad.tools.report.report_files import as_json
from subquad.tools.runs.records import from_plain

ROOT = Path(__file__).parents[1]
PAGE = "docs/results/speed-and-fidelity.md"
RESULTS = {  # by run: the report, and the plot with its name in the report
    "demo-decoder": ("benchmarks/results/compare-default.md", None, None),
    "longer": (
        "benchmarks/results/compare-longer.md",
        "docs/results/model-time-vs-length.png",
        "model-time-vs-length.png",
    ),
    "demo-encoder": (
        "benchmarks/results/compare-encoder.md",
        "docs/results/quality-vs-speed-encoder.png",
        "quality-vs-speed.png",
    ),
}
LONGER = [
    *("--extend", "16384", "--lengths", "2048,8192,16384", "--dtype", "bf16"),
    *("--new-tokens", "0", "--minutes", "10", "--methods"),
]
FITTED = ("lha:buckets=4", "lha-tail")
ROWS = {  # of the page's table, which has some of the report's: the method in the report, and its name in the table
    "full": "`full` (exact, SDPA)",
    "full:kernel=subquad": "`full:kernel=subquad` (exact)",
    "clustered:clusters=25": "`clustered:clusters=25`",
    "i-clustered:clusters=25": "`i-clustered:clusters=25`",
    "i-clustered": "`i-clustered` (100 clusters)",
    "clustered-tail:clusters=32,topk=32,cells=8": "`clustered-tail:clusters=32,topk=32,cells=8`",
    "clustered-tail": "`clustered-tail` (sizes by length)",
    "clustered-tail:clusters=64,topk=96": "`clustered-tail:clusters=64,topk=96`",
    "local": "`local:window=64`",
    "smyrf:cluster_size=64": "`smyrf:cluster_size=64`",
}
TABLE = re.compile(r"(?<=<!-- table:begin -->\n).*?(?=\n<!-- table:end -->)", re.DOTALL)


def table(report: Mapping[str, Any]) -> str:
    """Cosine and speed of each of ROWS at each length of the model, in Markdown."""
    found = {method["method"].partition("@")[0]: method for method in report["methods"]}
    lengths = [str(length) for length in report["settings"]["lengths"]]
    heads = [f"{int(n):,} tokens: {what}" for n in lengths for what in ("cosine", "speed")]
    lines = [["method", *heads], ["---"] * (1 + len(heads))]
    lines += [[called, *_figures(found[name], lengths)] for name, called in ROWS.items()]
    return _markdown(lines)


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _figures(method: Mapping[str, Any], lengths: Sequence[str]) -> list[str]:
    shown = []
    for n in lengths:
        cost = method["model"].get(n, {})
        speed = cells.speedup(cost.get("speedup"), cost.get("verdict")).text.strip("↓")
        shown += [cells.number(method["fidelity"].get(n)).text, speed]
    return shown


def measured(run: str, texts: Sequence[Path], work: Path) -> dict[str, Any]:
    """The report of a run in the folder `work`, where the texts have names without their folders."""
    out, words = f"subquad-compare-{run}", []
    if run == "longer":
        words = [*LONGER, " ".join(COMPARED_LONG)]
    if run == "demo-encoder":
        words = ["--dtype", "fp32", "--minutes", "15"]
        words += ["--methods", " ".join([*COMPARED, *(FITTED if texts else ())])]
        for text in texts:
            link = work / text.name
            link.unlink(missing_ok=True)
            link.symlink_to(text.resolve())
            words += ["--calibrate", text.name]
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-c", "from subquad.tools.cli.main import main; main()", "compare"]
    command += [*([run] if run == "demo-encoder" else []), *words, "--out", out]
    subprocess.run(command, cwd=work, check=True, env=os.environ | {"PYTHONPATH": path})
    report: dict[str, Any] = json.loads((work / out / "report.json").read_text("utf-8"))
    return report


def publish(run: str, report: Any, root: Path = ROOT) -> None:
    """Write the report and the plot under `root`, and the encoder's table."""
    result, plot, name = RESULTS[run]
    record: Report = from_plain(Report, report)
    (root / result).write_text(markdown(record), encoding="utf-8")
    (root / result).with_suffix(".json").write_bytes(as_json(record))
    if plot is not None:
        (root / plot).write_bytes(plots(record)[name])
    if run == "demo-encoder":
        text = (root / PAGE).read_text("utf-8")
        (root / PAGE).write_text(TABLE.sub(lambda _: table(report), text), encoding="utf-8")


def main(
    texts: Annotated[list[Path] | None, typer.Argument(help="to fit learned parameters on")] = None,
    runs: tuple[str, ...] = tuple(RESULTS),
    work: Annotated[Path, typer.Option(help="folder of the runs")] = Path("subquad-compare"),
    busy: Annotated[bool, typer.Option("--busy", help="write the files even if the machine was busy")] = False,
) -> None:
    sheet.check_known("--runs", runs, RESULTS)
    work.mkdir(parents=True, exist_ok=True)
    for run in runs:
        report = measured(run, texts or [], work)
        if report["noise"]["busy"] and not busy:
            sys.exit(f"{run}: nothing is written. {report['noise']['says']}")
        publish(run, report)


if __name__ == "__main__":
    sheet.run(main)
