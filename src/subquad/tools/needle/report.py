"""From the results of a run's units to its report."""

import math
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from subquad.methods.full import EXACT
from subquad.tools.measure.exact_limits import exact_up_to
from subquad.tools.measure.intervals import interval_of_mean, interval_of_share
from subquad.tools.models.compare_rows import CompareRow
from subquad.tools.models.longer import extension_note
from subquad.tools.needle.run import ORACLE, NeedleRun, Spot
from subquad.tools.needle.schema import NeedleCell, NeedleMethod, NeedleReport, Role
from subquad.tools.needle.settings import NeedleSettings
from subquad.tools.needle.tasks import TASKS
from subquad.tools.runs import machine
from subquad.tools.runs.options import as_command


def report_of(run: NeedleRun, asked: NeedleSettings) -> NeedleReport:
    """All figures, with what they depend on. `asked` are the settings as the user gave them: those of the command."""
    s = run.settings
    return NeedleReport(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=as_command("needle", asked),
        versions=machine.versions(),
        hardware=machine.hardware(s.device),
        settings={
            "tasks": list(dict.fromkeys(s.tasks)),
            "lengths": run.lengths,
            "depths": sorted(set(s.depths)),
            "samples": s.samples,
            "oracle_length": s.oracle_length,
            "seed": s.seed,
        },
        model=run.pretrained.metadata(),
        text=run.text,
        methods=[*(_method(run, row) for row in run.rows), *_oracle(run)],
        notes=list(_notes(run)),
    )


def _method(run: NeedleRun, row: CompareRow) -> NeedleMethod:
    role: Role = "exact" if row.is_exact else "measured"
    return NeedleMethod(row.name, role, row.method.to_dict(), _cells(run, row.name))


def _oracle(run: NeedleRun) -> list[NeedleMethod]:
    """The oracle, if it ran."""
    if not run.oracles:
        return []
    topk = {str(length): row.method.to_dict()["topk"] for length, row in run.oracles.items()}
    return [NeedleMethod(ORACLE, "oracle", {"name": ORACLE, "topk": topk}, _cells(run, ORACLE))]


def _cells(run: NeedleRun, name: str) -> list[NeedleCell]:
    """The means over the samples that this method read."""
    by_cell: dict[tuple[str, int, float | None], list[Spot]] = {}
    for spot in run.prompts:
        if name in run.rows_at(spot):
            by_cell.setdefault((spot.task, spot.length, spot.depth), []).append(spot)
    return [_cell(run, name, spots) for spots in by_cell.values()]


def _cell(run: NeedleRun, name: str, spots: Sequence[Spot]) -> NeedleCell:
    first, scores = spots[0], [run.score(spot, name) for spot in spots]
    mean = math.fsum(score.log_likelihood for score in scores) / len(scores)
    right = sum(score.right for score in scores) / len(scores)
    differences = [
        score.log_likelihood - run.score(spot, EXACT).log_likelihood for spot, score in zip(spots, scores, strict=True)
    ]
    finite = all(map(math.isfinite, (mean, *differences)))
    interval = interval_of_mean(differences) if finite else None
    return NeedleCell(
        first.task,
        first.length,
        first.depth,
        len(spots),
        log_likelihood=mean if finite else None,
        difference=math.fsum(differences) / len(differences) if finite else None,
        right=right,
        differences=differences if finite else None,
        interval=None if interval is None else list(interval),
        right_interval=list(interval_of_share(right, len(spots))),
    )


# ---------------------------------------------------------------------- what a reader must know


def _notes(run: NeedleRun) -> Iterator[str]:
    s = run.settings
    yield (
        "Each prompt is one prefill with the method, and the answer's tokens are steps on its cache, as in `generate`. "
        "A length is that of a prompt with its answer, and the question is at the end of the prompt."
    )
    yield f"Tasks: {'; '.join(f'{name}: {TASKS[name].meaning}' for name in dict.fromkeys(s.tasks))}."
    yield from _oracle_notes(run)
    for row in run.rows[1:]:
        most = exact_up_to(row.method, True, run.pretrained.model.dtype)
        if most >= run.lengths[0]:
            where = f"on at most {most:,.0f} tokens" if math.isfinite(most) else "with these settings"
            yield f"{row.name} is exact attention {where}."
        if row.reason:
            yield f"{row.name}: {row.reason}."
        if row.note:
            yield f"{row.name}: {row.note}."
    if (limit := run.pretrained.limit) is not None and run.lengths[-1] > limit:
        yield extension_note(limit, run.pretrained.extend, causal=True)
    yield from run.pretrained.notes
    yield from run.resumed_note


def _oracle_notes(run: NeedleRun) -> Iterator[str]:
    """The description of the oracle, and where it did not run."""
    if not run.oracles:
        reason = (
            f"no length is at most --oracle-length {run.settings.oracle_length:,}"
            if run.settings.oracle_length < run.lengths[0]
            else "no method is causal by halves with a number of top keys"
        )
        yield f"Without the oracle: {reason}."
        return
    keys = ", ".join(f"{row.method.to_dict()['topk']:,} at {n:,} tokens" for n, row in run.oracles.items())
    yield (
        f"{ORACLE} is the oracle: each query attends to its own best keys alone, as many as {run.matched} meets "
        f"exactly in the mean over the queries of a prompt ({keys})."
    )
    skipped = [f"{length:,}" for length in run.lengths if length not in run.oracles]
    if skipped:
        where = f"at {', '.join(skipped)} tokens, because it is slow"
        yield f"{ORACLE} was left out {where}; --oracle-length {run.lengths[-1]} includes them."
    if run.settings.samples > 1:
        yield f"{ORACLE} read the first of the {run.settings.samples} prompts of each task, length and depth."
