"""Do plans keep their floor on text that they were not made from, and how fast are they?

    python benchmarks/plans.py NOVELS SPEECHES [--lengths "512 1024"] [--seeds "0 1"] [--out PLANS.jsonl]

NOVELS and SPEECHES are folders of .txt files. For each length and seed a plan is made on one text and run on the other,
and the other way round. Rows of the same settings that the file of `--out` has already are not made again; a
table of all rows is printed.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import sheet
import torch

from subquad.tools.data.texts import read_documents
from subquad.tools.models.passages import read
from subquad.tools.models.pretrained import Pretrained, load, running
from subquad.tools.plan.length import swap_of
from subquad.tools.plan.loads import text_load
from subquad.tools.plan.run import of_text, plan_loads
from subquad.tools.plan.settings import PlanSettings

MINUTES = 8.0  # of a plan; also of rows in older files, which do not say it
HEAD = (
    "| planned on | run on | tokens | seed | seconds | predicted / measured loss | fidelity there | speed-up | "
    "best single method | other text: fidelity | lowest |"
)


def row(pretrained: Pretrained, texts: dict[str, list[str]], on: str, other: str, settings: PlanSettings) -> dict:
    """Plan on one text and run on the other."""
    (length,) = settings.lengths
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        loads, facts = of_text(pretrained, texts[on], settings)
        made = plan_loads(
            loads, settings, None, {}, Path(folder), lambda *_: None, facts, command="benchmarks/plans.py"
        )
    seconds = time.perf_counter() - begun
    planned = made.planning.lengths[0]
    by_name = {c.name: c for c in made.planning.candidates(length)}
    elsewhere = text_load(pretrained, read(pretrained, texts[other], length, 1, settings.seed), length)
    losses = []
    with torch.inference_mode():
        for item in elsewhere.held_out:
            exact = elsewhere.run(item)
            with running(elsewhere.model, swap_of(planned.chosen, by_name)):
                losses.append(elsewhere.loss(elsewhere.run(item), exact))
    found = planned.verified
    uniform = planned.uniform_verified
    return {
        "on": on, "other": other, "length": length, "seed": settings.seed, "seconds": round(seconds),
        "floor": settings.min_fidelity, "shift": settings.shift, "minutes": settings.minutes,
        "predicted": found.predicted if found else 0.0, "loss": found.loss if found else 0.0,
        "speedup": found.speedup if found else 1.0, "exact_because": planned.why_exact,
        "uniform": planned.uniform, "uniform_speedup": uniform.speedup if uniform else None,
        "other_loss": statistics.mean(losses), "other_worst": max(losses),
        "chosen": {str(n): name for n, name in planned.chosen.items()},
    }  # fmt: skip


def table(rows: Sequence[dict]) -> str:
    """All rows as Markdown, and how many keep their floor on the other text."""
    lines = [HEAD, "|" + " --- |" * (HEAD.count("|") - 1)]
    for r in rows:
        ratio = f"{r['predicted'] / r['loss']:.2f}" if r["loss"] else "exact"
        best = f"{r['uniform_speedup']:.2f}×" if r["uniform_speedup"] else "–"
        lines.append(
            f"| {r['on']} | {r['other']} | {r['length']:,} | {r['seed']} | {r['seconds']} | {ratio} | "
            f"{1 - r['loss']:.4f} | {r['speedup']:.2f}× | {best} | {1 - r['other_loss']:.4f} | "
            f"{1 - r['other_worst']:.4f} |"
        )
    kept = sum(1 - r["other_loss"] >= r["floor"] for r in rows)
    off = [abs(r["predicted"] / r["loss"] - 1) for r in rows if r["loss"]]
    lines += ["", f"{kept} of {len(rows)} plans keep their floor on the other text."]
    if off:
        lines.append(f"Predicted and measured loss differ by {100 * statistics.median(off):.0f} % in the median.")
    return "\n".join(lines)


def main(
    novels: Path,
    speeches: Path,
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096),
    seeds: tuple[int, ...] = (0,),
    minutes: float = MINUTES,
    floor: float = 0.99,
    shift: float = 1.6,
    out: Path = Path("plans.jsonl"),
) -> None:
    """Make the rows that are missing, and print the table."""
    texts = {name: read_documents((path,), "text") for name, path in (("novels", novels), ("speeches", speeches))}
    pretrained = load(None)
    rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    keys = ("on", "length", "seed", "floor", "shift", "minutes")
    have = {tuple(({"minutes": MINUTES} | r)[key] for key in keys) for r in rows}
    for seed in seeds:
        for length in lengths:
            for on, other in (("novels", "speeches"), ("speeches", "novels")):
                if (on, length, seed, floor, shift, minutes) in have:
                    continue
                settings = PlanSettings(lengths=(length,), seed=seed, minutes=minutes, min_fidelity=floor, shift=shift)
                rows.append(row(pretrained, texts, on, other, settings))
                with out.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
                print(rows[-1], flush=True)
    print(table(rows))


if __name__ == "__main__":
    sheet.run(main)
