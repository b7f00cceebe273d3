"""From the results of a comparison's units to its report."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import torch

from subquad.core.errors import InputError
from subquad.core.spelling import listed
from subquad.methods import METHODS
from subquad.methods.full import EXACT
from subquad.tools.compare.attachment import attachment
from subquad.tools.compare.code import code_of
from subquad.tools.compare.comparison import MOST_POSITIONS, TOO_SLOW, Comparison
from subquad.tools.compare.distinguish import distinguished
from subquad.tools.compare.growth import growth_note
from subquad.tools.compare.jobs import (
    EAGER,
    LAYERS,
    OP,
    QUALITY,
    SEQUENCE,
    STEPS,
    TASK,
    LayerErrors,
    Losses,
    SequencePass,
)
from subquad.tools.compare.recommend import recommend
from subquad.tools.compare.schema import (
    EagerCost,
    MethodReport,
    Quality,
    Recommendation,
    Report,
    RequestCost,
    Requests,
    RunNoise,
)
from subquad.tools.compare.settings import COMPARED, LENGTHS, OP_LENGTHS, CompareSettings
from subquad.tools.measure.exact_limits import exact_up_to
from subquad.tools.measure.fidelity import cosine, crossover, percentile, relative_error, retrieval_agreement
from subquad.tools.measure.noise import TIE, at_least_typical, noise_of
from subquad.tools.measure.rounds import RoundTimes
from subquad.tools.measure.without_attention import WITHOUT
from subquad.tools.models.dtypes import FP32, TORCH, has_products
from subquad.tools.models.generation import ROUNDS, takes_cache
from subquad.tools.models.longer import longer_note, quarters_note, yarn_note
from subquad.tools.models.next_tokens import NextTokens, summed
from subquad.tools.models.passages import FEWEST_PASSAGES
from subquad.tools.models.rows import IN, NOT_CALIBRATED, CompareRow
from subquad.tools.models.split import split_note, what_is_sent
from subquad.tools.report import content
from subquad.tools.runs import machine
from subquad.tools.runs.floor import OPTIONS, Floor
from subquad.tools.runs.options import as_command

NextCommand = Callable[..., str]  # the line of another command, from the number of ranks and fields of its settings
_REPEAT = "repeat the command with --again on an idle machine"
_INTERVAL = "95 % interval of the median of its ratios (by order statistics; the whole range of fewer than six turns)"


def report_of(comparison: Comparison, plan: NextCommand | None = None) -> Report:
    """All figures and the recommendation; `plan` makes the command that plans for the same model."""
    c, s = comparison, comparison.settings
    times = c.times
    noise = _noise(c, times)
    methods = [_method_report(c, row, times, noise) for row in c.rows] + [_refused(row) for row in c.refused]
    report = Report(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=as_command("compare", s.as_used, c.group.count),
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
        eager={str(n): _eager(c, n) for n in c.lengths if EAGER(n) in c.results},
        noise=noise,
        notes=_notes(c, methods),
        cautions=_cautions(c),
        quarters={str(n): c.quarters(n) for n in c.lengths_done if c.quarters(n)} or None,
        requests=_requests(c) if c.step_lengths_done else None,
        task={name: getattr(c.task, name) for name in ("name", "metric", "examples", "baselines")} if c.task else None,
        recommendation=Recommendation(choice=EXACT, headline="", reasons=[]),  # until it is made from the figures
    )
    return _with_recommendation(report, s, c.floor, plan)


def read_anew(report: Report, settings: CompareSettings, plan: NextCommand | None = None) -> Report:
    """A finished report as these settings read it: with a recommendation for their minimum fidelity.

    It is the same object where it was for that already.
    """
    previous = report.settings
    floor = Floor.for_model(settings, report.model["kind"])
    if previous.get("floor") == floor.to_dict():
        return report
    anew = replace(
        report,
        methods=[_judged_by(floor, method) for method in report.methods],
        command=as_command("compare", settings.as_used, previous.get("ranks", 1)),
        settings={**previous, "min_fidelity": floor.least, "floor": floor.to_dict()},
    )
    return _with_recommendation(anew, settings, floor, plan)


def why_not(report: Report) -> str:
    """The reason why there is nothing to save; empty if exact attention is recommended."""
    advice = report.recommendation
    if any(name != EXACT for name in (advice.by_length or {}).values()):
        return "no one row keeps the floor at all lengths; --lengths with one of them saves the method for that length"
    if advice.too_noisy is None:
        return ""
    where = listed([f"{n:,}" for n in advice.too_noisy])
    return f"the times were too noisy to compare speeds at {where} tokens; {_REPEAT}"


def _judged_by(floor: Floor, method: MethodReport) -> MethodReport:
    """A row of a finished report whose fidelity is in the unit of this floor."""
    if not floor.of_next_tokens or method.fidelity is None:
        return method
    quality = method.quality or {}
    if any(getattr(each, floor.figure) is None for each in quality.values()):
        raise InputError(f"the finished report has no {floor.figure}: --again measures it")
    return replace(method, fidelity={n: _fidelity(each, each, floor) for n, each in quality.items()})


def _with_recommendation(report: Report, settings: CompareSettings, floor: Floor, plan: NextCommand | None) -> Report:
    """The report with the recommendation under this floor, and the command that plans for the same model and text."""
    lengths, tokens, model = report.settings["lengths"], report.text["tokens"], report.model
    factors = {} if report.noise is None else {int(n): factor for n, factor in report.noise.model.items()}
    bottoms = {
        int(n): _fidelity(each, each, floor)
        for n, each in (report.without_attention or {}).items()
        if each.of_exact is not None or model["kind"] != "masked-lm"  # otherwise its distance to exact is unknown
    }
    methods, blind = distinguished(report.methods, lengths, floor, bottoms)
    judged = lengths[::-1] if floor.of_next_tokens else lengths  # a causal model is about the longest prompt
    advice = recommend(methods, judged, floor, tokens, factors, _REPEAT, blind)
    attached = attachment(methods, lengths, floor, tokens, factors, model["position_limit"])
    grown = growth_note(methods, [n for n in lengths if n <= tokens], floor)
    choices = {advice.choice, *(advice.by_length or {}).values()} - {EXACT}
    dtypes = [m.dtype or FP32 for m in methods if m.method in choices]
    long_enough = tuple(length for length in lengths if FEWEST_PASSAGES * length <= tokens)
    command = None
    if plan is not None and long_enough:
        shared = ("model", "text", "column", *OPTIONS.values(), "extend", "adapters", "calibrate", "device", "seed")
        options = {name: getattr(settings, name) for name in shared} | {"dtype": dtypes[0] if dtypes else FP32}
        command = plan(report.settings.get("ranks", 1), lengths=long_enough, **options)
    recommendation = replace(
        advice,
        reasons=[*advice.reasons, *filter(None, (grown, None if attached is None else attached.note))],
        warning=content.warning(report.noise) or None,
        attachment=attached,
        code=None if attached is None else code_of(attached, methods, model, settings.model),
        next=command,
    )
    return replace(report, recommendation=recommendation)


def _noise(c: Comparison, times: Mapping[str, Mapping[str, RoundTimes]]) -> RunNoise:
    """The difference of exact attention from itself at each length, and the load of the machine."""
    kinds = (c.results.all(SEQUENCE), c.results.all(OP), c.results.all(STEPS))
    uses = [job.use for results in kinds for job in results]
    models = [each.noise for each in times["model"].values() if not each.is_assumed]
    noise = noise_of(
        machine.load(c.load_average, uses), [*models, *(each.noise for each in times["op"].values())], models
    )
    factors = {
        part: at_least_typical({n: each.noise for n, each in by_length.items()}) for part, by_length in times.items()
    }
    return RunNoise(noise.load, noise.busy, noise.says, **factors)


# ---------------------------------------------------------------------- one method


def _refused(row: CompareRow) -> MethodReport:
    return MethodReport(method=row.name, settings=row.method.to_dict(), status="refused", reason=row.reason or "")


def _method_report(
    c: Comparison, row: CompareRow, times: Mapping[str, Mapping[str, RoundTimes]], noise: RunNoise
) -> MethodReport:
    quality = {str(n): q for n in c.lengths_done if (q := _quality(c, row, n))}
    exact = next(each.name for each in c.rows if each.is_full and each.dtype == row.dtype)
    costs = {
        part: {
            n: each.cost(row.name, getattr(noise, part)[n], exact)
            for n, each in of_part.items()
            if row.name in each.seconds
        }
        for part, of_part in times.items()
    }
    op, new_tokens = costs["op"], {n: c.new_tokens_after(int(n)) for n in costs["step"]}
    requests = {n: RequestCost(**vars(costs["request"][n]), new_tokens=new) for n, new in new_tokens.items()}
    kls = {n: c.results[STEPS(int(n))].times.rows[row.name].kl for n in costs["step"]}
    ties = [int(n) for n, cost in op.items() if cost.verdict == "within the noise"]
    has_crossover = bool(op) and not row.is_exact
    return MethodReport(
        method=row.name,
        settings=row.method.to_dict(),
        status="exact" if row.is_exact else "measured" if row.other is None else "other",
        dtype=row.dtype,
        layers=row.layers,
        quality=quality,
        fidelity={n: _fidelity(q, _quality(c, c.rows[0], int(n)), c.floor) for n, q in quality.items()},
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
        remarks=_row_notes(row, c.length, causal=c.pretrained.is_causal_lm) or None,
        crossover=crossover({int(n): cost.speedup for n, cost in op.items()}, ties) if has_crossover else math.nan,
        task=c.results[TASK(row.name)] if c.task and TASK(row.name) in c.results else None,
    )


def _eager(c: Comparison, length: int) -> EagerCost:
    """The model's own attention as eager code, relative to SDPA's first batch, which is the same one."""
    eager, exact = c.results[EAGER(length)], c.rounds_at(length)[0][EXACT]
    return EagerCost(ms=1e3 * eager.seconds, speedup=exact.seconds / eager.seconds, extra_mib=eager.extra_mib)


def _quality(c: Comparison, row: CompareRow, length: int) -> Quality | None:
    """Closeness to the exact model at a length; None where the method was left out."""
    layers = c.results[LAYERS(row.name)] if length == c.length and LAYERS(row.name) in c.results else LayerErrors()
    if length == c.length and c.has_passages:
        return replace(_of_passages(c, row), **vars(layers))
    runs = c.rounds_at(length)
    return replace(_of_sequences(c, row.name, runs), **vars(layers)) if row.name in runs[0] else None


def _without_attention(c: Comparison, length: int) -> Quality | None:
    """Closeness of the model without attention to the exact one in the first batch; None if it was not run."""
    first = c.rounds_at(length)[:1]
    if WITHOUT not in first[0]:
        return None
    quality, of_exact = _of_sequences(c, WITHOUT, first), None
    if c.pretrained.kind == "masked-lm":
        of_exact = _fidelity(quality, _of_sequences(c, EXACT, first), c.floor)
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


def _fidelity(quality: Any, exact: Any, floor: Floor) -> float:
    """Mean cosine to the exact embeddings; exact pseudo-perplexity / this one's, at most 1; or what the floor is of."""
    if floor.figure == "agreement":
        return float(quality.agreement)
    if floor.figure == "kl":
        return math.exp(-quality.kl)
    if quality.of_exact is not None:
        return float(quality.of_exact)
    if quality.perplexity is not None:
        return float(min(1.0, exact.perplexity / quality.perplexity))
    return float(quality.cosine_mean)


def _perplexity(nll: float, count: int) -> float:
    return math.exp(nll / max(count, 1))


def _requests(c: Comparison) -> Requests:
    """Facts about the requests of all rows."""
    lengths = c.step_lengths_done
    rows = {n: c.results[STEPS(n)].times.rows for n in lengths}
    approximate = [row for row in c.rows if not (row.is_full or row.has_exact_steps)]
    kls: dict[str, tuple[float, int]] = {}  # of each method in the first of its dtypes, and at its longest length
    for row in approximate:
        of_row = [(kl, n) for n in lengths if row.name in rows[n] and (kl := rows[n][row.name].kl) is not None]
        if of_row and not any(name.partition(IN)[0] == row.name.partition(IN)[0] for name in kls):
            kls[row.name] = of_row[-1]
    return Requests(
        new_tokens=c.new_tokens_after(lengths[-1]),
        prompts={str(n): c.prompt_of_request(n) for n in lengths},
        cache_mib={str(n): c.results[STEPS(n)].times.cache_mib for n in lengths},
        steps=_steps_in_words(kls),
        refused={name: row.reason for n in lengths for name, row in rows[n].items() if row.reason is not None},
    )


def _steps_in_words(kls: Mapping[str, tuple[float, int]]) -> str:
    """The rows whose steps are exact attention; `kls` has the divergences of the other steps, each with its past."""
    exact = "Steps are exact attention by construction, over the keys and values of the row's own prefill"
    if not kls:
        return f"{exact}."
    shown = [f"{name} (a KL of {kl:.2g} to an exact step after {n:,} tokens)" for name, (kl, n) in kls.items()]
    others = f", and {len(shown) - 5} more rows" if len(shown) > 5 else ""
    return f"{exact}, except those of {listed(shown[:5])}{others}."


# ---------------------------------------------------------------------- what a reader must know


def _notes(c: Comparison, methods: Sequence[MethodReport]) -> list[str]:
    tried = {row.method.name for row in (*c.rows, *c.refused)}
    notes = [
        f"{len(tried)} of the library's {len(METHODS)} methods are in this comparison, with these settings only; "
        "`subquad methods` lists all of them.",
        f"A speed-up is the median of the ratios to exact attention (SDPA) within a turn, on {_batches(c)}; a time is "
        "exact attention's median time divided by the speed-up.",
        *_of_long(c),
        "A method counts as faster or slower if its speed-up differs from 1 by more than exact attention, timed "
        f"twice in each turn, differs from itself (and by more than {TIE:g}×), and the {_INTERVAL} "
        "is on one side of 1.",
        "One attention call is timed on N(0,1) inputs of one layer's shape; these times have no fidelity.",
        *_of_dtypes(c),
        *c.pretrained.notes,
    ]
    if c.settings.layers:
        notes.append(
            "Layer errors and distances of weights are measured on the exact model's own queries, keys and values."
        )
    if EAGER(c.length) in c.results:
        notes.append(
            "Eager attention is the model's own code that forms the whole matrix of weights, in fp32; it ran once at "
            "each length."
        )
    notes[:0] = _cautions(c)
    if c.group.count > 1:
        notes.append(split_note(c.group.count) + " Distances of attention weights are not measured then.")
    notes += _not_measured(c.settings)
    if len(c.reading.tokens) < c.lengths[-1]:
        notes.append(f"The text has {len(c.reading.tokens):,} tokens; longer sequences repeat it.")
    if c.pretrained.is_causal_lm:
        notes.append(
            "A time is that of a prefill: the whole input, and the logits of its last token. KL, top tokens and "
            f"perplexity are those of the same passes, at up to {MOST_POSITIONS:,} positions of each, evenly spaced."
        )
        notes += _of_requests(c)
        if c.settings.methods == COMPARED:
            notes.append(
                "Left out by default in a causal language model: smyrf and nystrom are not causal, and performer, "
                "linear and other feature maps are far from exact attention there without training. --methods names "
                "others."
            )
    if c.pretrained.kind == "masked-lm":
        notes.append("Pseudo-perplexity: 15 % of the tokens masked at once, the same ones for every method.")
    measured = zip(c.rows, methods, strict=False)  # those that were refused come last
    notes += [note for row, method in measured if (note := _left_out(c, row, method))]
    notes += [note for row in (*c.rows, *c.refused) if (note := _defaults(row))]
    notes += [f"{row.name}: {row.note}." for row in c.rows if row.note]
    return notes + c.resumed_note


def _of_requests(c: Comparison) -> list[str]:
    """The way in which steps and requests were measured, and the lengths at which they were not."""
    notes = []
    if c.step_lengths_done:
        notes.append(
            "A generated token is one step on the cache of a prompt of that length (`DynamicCache`), without the "
            f"choice of the token; in {ROUNDS} rounds, all rows run it on the same keys and values. A request is the "
            "prefill and a step of the median time for each further new token: later steps read a few more tokens, "
            "which is not counted. Its extra memory includes the cache."
        )
        cut = {n: most for n in c.step_lengths_done if (most := c.prompt_of_request(n)) < n}
        notes += [
            f"The model has {c.pretrained.limit:,} positions: the new tokens of requests with {n:,} tokens come after "
            f"the first {most:,}, and the prefill is timed with all."
            for n, most in cut.items()
        ]
        notes += [f"{name} has no steps: {reason}." for name, reason in _requests(c).refused.items()]
    without = [f"{n:,}" for n in c.lengths if n not in c.step_lengths]
    if without and c.settings.new_tokens != 0:
        limit = c.pretrained.limit
        why = f"the model has {limit:,} positions, and --new-tokens and --lengths choose others"
        if c.group.count > 1:
            why = "tokens that are split over processes have no cache"
        elif not takes_cache(c.pretrained.model):
            why = "the model takes no cache"
        notes.append(f"No requests after {listed(without)} tokens: {why}.")
    return notes


def _of_long(c: Comparison) -> list[str]:
    """The notes on how causal models are run at long lengths."""
    lengths = [f"{n:,}" for n in c.lengths_done if c.is_long(n)]
    if not lengths:
        return []
    where, dtype = f"At {listed(lengths)} tokens", c.dtypes[-1]
    once = f", exact attention in fp32 ran once, and the other rows ran in {dtype} only" if dtype != FP32 else ""
    return [f"{where}, all turns read one text{once}; the noise is how far the speed-ups of different turns differ."]


def _batches(c: Comparison) -> str:
    size = c.settings.batch
    return "batches of one" if size == 1 else f"batches of {size} padded texts, with the lengths that the text has"


def _of_dtypes(c: Comparison) -> list[str]:
    """The notes on 16-bit dtypes: what their figures are relative to, and which the processor is not made for."""
    small = [dtype for dtype in c.dtypes if dtype != FP32]
    notes = [
        f"In {dtype}, weights and activations have 16 bits. Fidelity is to exact attention in fp32; a speed-up is over "
        f"exact attention in {dtype}, and the column “over fp32” is over exact attention in fp32."
        for dtype in small
    ]
    slow = [dtype for dtype in small if not has_products(c.settings.device, dtype)]
    return notes + [f"This processor has no products in {dtype}, which it computes in fp32 instead." for dtype in slow]


def _cautions(c: Comparison) -> list[str]:
    """The notes to read before the figures: what is missing, and that positions were extended."""
    limit = c.pretrained.limit
    if limit is None or not c.is_extended(c.lengths[-1]):
        return _out_of_time(c)
    is_rotary, extended = c.pretrained.is_rotary, c.pretrained.extend or c.lengths[-1]
    read = [quarters_note(n, c.quarters(n)) for n in c.lengths_done if c.quarters(n)]
    return [*_out_of_time(c), yarn_note(limit, extended) if is_rotary else longer_note(limit), *read]


def _out_of_time(c: Comparison) -> list[str]:
    """A note on what is still to come, or on what the time limit left out; none if the run is finished."""
    if c.is_finished:
        return []
    if not c.ended:
        return ["Unfinished: the run goes on, and writes this report again from time to time."]
    batches = {n: (c.sequence_count(n) - len(c.rounds_at(n)), c.sequence_count(n)) for n in c.lengths}
    rounds = {n: "turns" if c.is_long(n) else "batches" for n in c.lengths}
    calls = [f"{n:,}" for n in c.call_lengths if OP(n) not in c.results]
    steps = [f"{n:,}" for n in c.step_lengths if STEPS(n) not in c.results]
    eager = [f"{n:,}" for n in c.lengths if c.has_eager and not c.is_long(n) and EAGER(n) not in c.results]
    left_out = [
        *(f"{missing} of {most} {rounds[n]} of {n:,} tokens" for n, (missing, most) in batches.items() if missing),
        *([] if c.has_passages or c.pretrained.is_causal_lm else [f"{len(c.reading.passages)} passages"]),
        *([f"requests after {listed(steps)} tokens"] if steps else []),
        *([f"eager attention at {listed(eager)} tokens"] if eager else []),
        *([f"one attention call at {listed(calls)} tokens"] if calls else []),
    ]
    return [f"Left out for lack of time (--minutes {c.settings.minutes:g}): {'; '.join(left_out)}."]


def _not_measured(settings: CompareSettings) -> list[str]:
    """The usual lengths that exceed the maximum length, as a note."""
    most = settings.max_length
    if most is None or settings.lengths is not None or settings.op_lengths is not None:
        return []
    skipped = [f"{n:,}" for n in sorted({*LENGTHS, *OP_LENGTHS}) if n > most]
    return [f"Not measured, because they exceed --max-length {most:,}: {', '.join(skipped)} tokens."] if skipped else []


def _defaults(row: CompareRow) -> str | None:
    """The settings of a method that is named without settings."""
    settings = ", ".join(f"{name}={value}" for name, value in row.method.to_dict().items() if name != "name")
    return f"{row.name} alone means {settings}." if settings and ":" not in row.name else None


def _row_notes(row: CompareRow, length: int, causal: bool) -> list[str]:
    """Remarks that the figures of a row do not show."""
    notes, most = [], exact_up_to(row.method, causal, TORCH[row.dtype])
    if row.modes:
        notes.append(what_is_sent(row.modes))
    if not row.is_full and row.other is None and most >= length:
        where = f"on at most {most:,.0f} tokens" if math.isfinite(most) else "with these settings"
        by_halves = causal and row.method.traits.by_halves  # whose exact blocks run subquad's kernel
        notes.append(f"is exact attention {where}{'' if by_halves else '; a speed-up there is due to chance'}")
    if row.longest is not None:
        notes.append(f"its parameters are for at most {row.longest:,} tokens, and it was not run on more")
    return notes


def _left_out(c: Comparison, row: CompareRow, method: MethodReport) -> str | None:
    """The length from which on a method was too slow, as a note."""
    op_lengths = c.call_lengths_done if row.is_called_alone else []
    lengths = [n for n in c.lengths_done if row in c.rows_at(n, 0)]
    wanted = ((lengths, method.model), (op_lengths, method.op))
    skipped = [n for lengths, have in wanted for n in lengths if str(n) not in (have or {}) and row.takes(n)]
    if not skipped:
        return None
    where = f"from {min(skipped):,} tokens on"
    return f"{method.method} was left out {where}: it is predicted to exceed {TOO_SLOW:g} s per call."
