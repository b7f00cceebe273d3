"""The published figures of `subquad compare`, from one run with its default rows.

    python benchmarks/compare_default.py [NOVEL.txt …]

compares the default rows on the default text, and with texts also `lha:buckets=4` and `lha-tail` fitted on them. It
writes the report to `benchmarks/results/compare-default.md`, the table of all rows and the plot of fidelity against
speed to `docs/results/`, and the table of the fastest rows to README.md; tables stand between marks. Run it alone on
the machine: if the report says that the machine was busy, nothing is written unless `--busy` is given. An interrupted
run resumes.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from subquad.tools.compare.plots import plots
from subquad.tools.compare.recommend import fastest
from subquad.tools.compare.tables import markdown
from subquad.tools.report import cells
from subquad.tools.runs.floor import Floor
from subquad.tools.runs.settings import COMPARED

ROOT = Path(__file__).parents[1]
README, RESULT = "README.md", "benchmarks/results/compare-default.md"
PAGE, PLOT = "docs/results/speed-and-fidelity.md", "docs/results/quality-vs-speed.png"
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


def summary(report: Mapping[str, Any]) -> str:
    """README's table: the fastest row at each length that keeps the report's minimum fidelity, in Markdown."""
    settings = report["settings"]
    floor = Floor("fidelity", settings["min_fidelity"])
    found = fastest(report["methods"], settings["lengths"], floor, report["text"]["tokens"])
    lines = [["tokens", "fastest method", "cosine to exact", "speed of the whole model"], ["---"] * 4]
    for length, method in found.items():
        if method is None:
            lines.append([f"{length:,}", "exact attention", "1.000", "1.00×"])
        else:
            lines.append([f"{length:,}", f"`{method['method']}`", *_figures(method, [str(length)])])
    return _markdown(lines)


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


def measured(texts: Sequence[Path], work: Path) -> dict[str, Any]:
    """The report of the run in the folder `work`, where the texts have names without their folders."""
    for text in texts:
        link = work / text.name
        link.unlink(missing_ok=True)
        link.symlink_to(text.resolve())
    words = ["compare", "--methods", " ".join([*COMPARED, *(FITTED if texts else ())]), "--out", "subquad-compare"]
    words += [word for text in texts for word in ("--calibrate", text.name)]
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-c", "from subquad.tools.cli.main import main; main()", *words]
    subprocess.run(command, cwd=work, check=True, env=os.environ | {"PYTHONPATH": path})
    report: dict[str, Any] = json.loads((work / "subquad-compare" / "report.json").read_text("utf-8"))
    return report


def publish(report: Any, root: Path = ROOT) -> None:
    """Write the report, the plot and both tables under `root`."""
    (root / RESULT).write_text(markdown(report), encoding="utf-8")
    (root / PLOT).write_bytes(plots(report)[Path(PLOT).name])
    for name, made in {README: summary(report), PAGE: table(report)}.items():
        text = (root / name).read_text("utf-8")
        (root / name).write_text(TABLE.sub(lambda _, made=made: made, text), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="*", type=Path, help="to fit learned parameters on")
    parser.add_argument("--work", type=Path, default=Path("subquad-compare"), help="folder of the run")
    parser.add_argument("--busy", action="store_true", help="write the files even if the machine was busy")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    report = measured(given.texts, given.work)
    if report["noise"]["busy"] and not given.busy:
        sys.exit(f"Nothing is written. {report['noise']['says']}")
    publish(report)


if __name__ == "__main__":
    main()
