"""From the results of a comparison's jobs to its report."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime

import torch

from subquad.core.spelling import listed
from subquad.methods.full import EXACT
from subquad.tools.compare.compare_jobs import EAGER, LAYERS, OP, QUALITY, SEQUENCE, STEPS, TASK, Losses, SequencePass
from subquad.tools.compare.comparison import Comparison
from subquad.tools.compare.judgement import NextCommand, fidelities, fidelity_of, recommendation_of
from subquad.tools.compare.notes import cautions_of, notes_of, notes_on_row, requests_of
from subquad.tools.compare.schema import EagerCost, MeasuredReport, MethodReport, Quality, Report, RequestCost, RunNoise
from subquad.tools.measure.fidelity import cosine, crossover, percentile, relative_error, retrieval_agreement
from subquad.tools.measure.noise import at_least_typical, noise_of
from subquad.tools.measure.rounds import RoundTimes
from subquad.tools.measure.without_attention import WITHOUT
from subquad.tools.models.compare_rows import NOT_CALIBRATED, CompareRow
from subquad.tools.models.next_tokens import NextTokens, summed
from subquad.tools.runs import machine
from subquad.tools.runs.options import as_command

Times = Mapping[str, Mapping[str, RoundTimes]]  # by what was timed, as the report names it, and by length
Noise = Mapping[str, dict[str, float]]  # the same: how far exact attention differs from itself, as a factor


def report_of(comparison: Comparison, plan: NextCommand | None = None) -> Report:
    """All figures and the recommendation; `plan` makes the command that plans for the same model."""
    c, s = comparison, comparison.settings
    times = c.times
    noise = {part: at_least_typical({n: each.noise for n, each in of_part.items()}) for part, of_part in times.items()}
    methods = [_method_report(c, row, times, noise) for row in c.rows] + [_refused(row) for row in c.refused]
    measured = MeasuredReport(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=as_command("compare", c.asked.as_used, c.group.count),
        versions=machine.versions(),
        hardware=machine.hardware(s.device),
        settings={
            "max_length": c.length,
            "lengths": c.lengths_done,
            "op_lengths": c.call_lengths_done,
            "dtypes": c.dtypes,
            "batch": s.batch,
            "batch_tokens": {str(n): c.tokens(n) for n in c.lengths_done},
            "minutes": s.minutes,
            "min_fidelity": c.floor.least,
            "floor": c.floor.to_dict(),
            "seed": s.seed,
            **({"passages": len(c.reading.passages)} if c.has_passages else {}),
            "sequences": {str(n): c.texts_at(n) for n in c.lengths_done[1 if c.has_passages else 0 :]},
            **({"new_tokens": c.new_tokens_after(c.step_lengths[0])} if c.step_lengths else {}),
            **({"ranks": c.group.count} if c.group.count > 1 else {}),
        },
        model=c.pretrained.metadata(),
        text=c.reading.metadata(s.text),
        methods=methods,
        without_attention={str(n): each for n in c.lengths_done if (each := _without_attention(c, n))},
        eager={str(n): _eager(c, n) for n in c.lengths if c.ran_eager(n)},
        noise=_noise(c, times, noise),
        notes=notes_of(c, methods),
        cautions=cautions_of(c),
        quarters={str(n): c.quarters(n) for n in c.lengths_done if c.quarters(n)} or None,
        requests=requests_of(c) if c.step_lengths_done else None,
        task={name: getattr(c.task, name) for name in ("name", "metric", "examples", "baselines")} if c.task else None,
    )
    return Report(**vars(measured), recommendation=recommendation_of(measured, s, c.floor, plan))


def _noise(c: Comparison, times: Times, factors: Noise) -> RunNoise:
    """The difference of exact attention from itself at each length, and the load of the machine."""
    kinds = (c.results.all(SEQUENCE), c.results.all(OP), c.results.all(STEPS))
    uses = [job.use for results in kinds for job in results]
    models = [each.noise for each in times["model"].values() if not each.is_assumed]
    calls = [each.noise for each in times["op"].values()]
    noise = noise_of(machine.load(c.load_average, uses), [*models, *calls], models)
    return RunNoise(noise.load, noise.busy, noise.says, **factors)


def _refused(row: CompareRow) -> MethodReport:
    return MethodReport(method=row.name, settings=row.method.to_dict(), status="refused", reason=row.reason or "")


def _method_report(c: Comparison, row: CompareRow, times: Times, noise: Noise) -> MethodReport:
    quality = _qualities(c, row)
    exact = next(each.name for each in c.rows if each.is_full and each.dtype == row.dtype)
    costs = {
        part: {n: each.cost(row.name, noise[part][n], exact) for n, each in of_part.items() if row.name in each.seconds}
        for part, of_part in times.items()
    }
    op, new_tokens = costs["op"], {n: c.new_tokens_after(int(n)) for n in costs["step"]}
    requests = {n: RequestCost(**vars(costs["request"][n]), new_tokens=new) for n, new in new_tokens.items()}
    kls = {n: c.results[STEPS(int(n))].times.rows[row.name].kl for n in costs["step"]}
    ties = [int(n) for n, cost in op.items() if cost.verdict == "within the noise"]
    has_crossover = bool(op) and not row.is_exact
    fidelity = fidelities(quality, _qualities(c, c.rows[0]), c.floor)
    notes = [*_not_finite(quality, fidelity), *notes_on_row(row, c.length, causal=c.pretrained.is_causal_lm)]
    return MethodReport(
        method=row.name,
        settings=row.method.to_dict(),
        status="exact" if row.is_exact else "measured" if row.other is None else "other",
        dtype=row.dtype,
        layers=row.layers,
        quality=quality,
        fidelity=fidelity,
        model=costs["model"],
        op=op,
        step=costs["step"] or None,
        request=requests or None,
        step_kl={n: kl for n, kl in kls.items() if kl is not None} or None,
        parallel=list(row.modes) or None,
        adapter=row.adapter or None,
        plan=row.plan or None,
        unfitted=row.note == NOT_CALIBRATED or None,
        reason=row.reason or None,
        remarks=notes or None,
        crossover=crossover({int(n): cost.speedup for n, cost in op.items()}, ties) if has_crossover else math.nan,
        task=c.results[TASK(row.name)] if c.task and TASK(row.name) in c.results else None,
    )


def _not_finite(quality: Mapping[str, Quality], fidelity: Mapping[str, float]) -> list[str]:
    """A remark on the lengths at which the outputs of a row have no fidelity."""
    lengths = [f"{int(n):,}" for n in quality if n not in fidelity]
    return [f"its outputs are NaN or infinite at {listed(lengths)} tokens"] if lengths else []


def _eager(c: Comparison, length: int) -> EagerCost:
    """The model's own attention as eager code, relative to SDPA's first batch, which is the same one."""
    eager, exact = c.results[EAGER(length)], c.rounds_at(length)[0][EXACT]
    return EagerCost(ms=1e3 * eager.seconds, speedup=exact.seconds / eager.seconds, extra_mib=eager.extra_mib)


def _qualities(c: Comparison, row: CompareRow) -> dict[str, Quality]:
    """Closeness to the exact model by length, where the method was run."""
    return {str(n): quality for n in c.lengths_done if (quality := _quality(c, row, n))}


def _quality(c: Comparison, row: CompareRow, length: int) -> Quality | None:
    """Closeness to the exact model at a length; None where the method was left out."""
    layers = vars(c.results[LAYERS(row.name)]) if length == c.length and LAYERS(row.name) in c.results else {}
    if length == c.length and c.has_passages:
        return replace(_of_passages(c, row), **layers)
    runs = c.rounds_at(length)
    return replace(_of_sequences(c, row.name, runs), **layers) if row.name in runs[0] else None


def _without_attention(c: Comparison, length: int) -> Quality | None:
    """Closeness of the model without attention to the exact one in the first batch; None if it was not run."""
    first = c.rounds_at(length)[:1]
    if WITHOUT not in first[0]:
        return None
    quality, of_exact = _of_sequences(c, WITHOUT, first), None
    if c.pretrained.kind == "masked-lm":
        of_exact = fidelity_of(quality, _of_sequences(c, EXACT, first), c.floor)
    return replace(quality, of_exact=of_exact, kl_last_quarter=None, agreement_last_quarter=None)


def _of_sequences(c: Comparison, name: str, runs: Sequence[Mapping[str, SequencePass]]) -> Quality:
    """Closeness of a row in the batches that are timed; of a causal model that of its next tokens."""
    mine, exact = ([run[each].output for run in runs if each in run] for each in (name, EXACT))
    if c.pretrained.kind == "embedding":
        return _cosines(*(torch.tensor([vector for batch in each for vector in batch]) for each in (mine, exact)))
    if not c.pretrained.is_causal_lm:
        return Quality(perplexity=_perplexity(*map(sum, zip(*mine, strict=True))))
    totals = summed([NextTokens(*output) for output in mine if output])
    last = max(totals.last_count, 1.0)
    return Quality(
        perplexity=totals.perplexity,
        kl=totals.mean_kl,
        agreement=totals.agreement,
        kl_last_quarter=max(totals.last_kl / last, 0.0),
        agreement_last_quarter=totals.last_same / last,
    )


def _of_passages(c: Comparison, row: CompareRow) -> Quality:
    """Closeness in the passages and queries at the model's own length."""
    mine, exact = c.results[QUALITY(row.name)], c.results[QUALITY(EXACT)]
    if isinstance(mine, Losses) or isinstance(exact, Losses):
        assert isinstance(mine, Losses)
        return Quality(perplexity=_perplexity(mine.nll, mine.count))
    passages, its_passages = torch.tensor(mine.passages), torch.tensor(exact.passages)
    top1, recall10 = retrieval_agreement(
        _scores(torch.tensor(mine.queries), passages), _scores(torch.tensor(exact.queries), its_passages)
    )
    return replace(_cosines(passages, its_passages), top1=top1, recall10=recall10)


def _cosines(mine: torch.Tensor, exact: torch.Tensor) -> Quality:
    cosines = cosine(mine, exact)
    return Quality(
        cosine_mean=float(cosines.mean()),
        cosine_p5=percentile(cosines, 0.05),
        relative_error=relative_error(mine, exact),
    )


def _scores(queries: torch.Tensor, passages: torch.Tensor) -> torch.Tensor:
    normalize = torch.nn.functional.normalize
    return normalize(queries, dim=-1) @ normalize(passages, dim=-1).T


def _perplexity(nll: float, count: int) -> float:
    return math.exp(nll / max(count, 1))
