"""The judgement of the figures of a report: fidelities and the recommendation under a floor."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from subquad.core.errors import InputError
from subquad.core.spelling import listed
from subquad.methods.full import EXACT
from subquad.tools.compare.attachment import attachment
from subquad.tools.compare.code import code_of
from subquad.tools.compare.distinguish import distinguished
from subquad.tools.compare.growth import growth_note
from subquad.tools.compare.recommend import recommend
from subquad.tools.compare.schema import MeasuredReport, MethodReport, Quality, Recommendation, Report
from subquad.tools.compare.settings import CompareSettings
from subquad.tools.models.dtypes import FP32
from subquad.tools.models.passages import FEWEST_PASSAGES
from subquad.tools.report import content
from subquad.tools.runs.floor import OPTIONS, Floor
from subquad.tools.runs.options import as_command

NextCommand = Callable[..., str]  # the line of another command, from the number of ranks and fields of its settings
_REPEAT = "repeat the command with --again on an idle machine"


def recommendation_of(
    report: MeasuredReport, settings: CompareSettings, floor: Floor, plan: NextCommand | None
) -> Recommendation:
    """The recommendation under this floor, and the command that plans for the same model and text."""
    lengths, tokens, model = report.settings["lengths"], report.text["tokens"], report.model
    factors = {} if report.noise is None else {int(n): factor for n, factor in report.noise.model.items()}
    bottoms = {int(n): each for n, each in fidelities(report.without_attention or {}, {}, floor).items()}
    methods, blind = distinguished(report.methods, lengths, floor, bottoms)
    judged = lengths[::-1] if floor.of_next_tokens else lengths  # a causal model is about the longest prompt
    advice = recommend(methods, judged, floor, tokens, factors, _REPEAT, blind)
    attached = attachment(methods, lengths, floor, tokens, factors, model["position_limit"])
    timed = [n for n in lengths if n <= tokens and n not in (advice.too_noisy or ())]
    grown = growth_note(methods, timed, floor, factors)
    choices = {advice.choice, *(advice.by_length or {}).values()} - {EXACT}
    dtypes = [m.dtype or FP32 for m in methods if m.method in choices]
    long_enough = tuple(length for length in lengths if FEWEST_PASSAGES * length <= tokens)
    command = None
    if plan is not None and long_enough:
        shared = ("model", "text", "column", *OPTIONS.values(), "extend", "adapters", "calibrate", "device", "seed")
        options = {name: getattr(settings, name) for name in shared} | {"dtype": dtypes[0] if dtypes else FP32}
        command = plan(report.settings.get("ranks", 1), lengths=long_enough, **options)
    return replace(
        advice,
        reasons=[*advice.reasons, *filter(None, (grown, None if attached is None else attached.note))],
        warning=content.warning(report.noise) or None,
        attachment=attached,
        code=None if attached is None else code_of(attached, methods, model, settings.model),
        next=command,
    )


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
    return replace(anew, recommendation=recommendation_of(anew, settings, floor, plan))


def _judged_by(floor: Floor, method: MethodReport) -> MethodReport:
    """A row of a finished report whose fidelity is in the unit of this floor."""
    if not floor.of_next_tokens or method.fidelity is None:
        return method
    quality = method.quality or {}
    fidelity = fidelities(quality, {}, floor)
    if method.status == "exact" and len(fidelity) < len(quality):  # that of another row may be NaN
        raise InputError(f"the finished report has no {floor.figure}: --again measures it")
    return replace(method, fidelity=fidelity)


def fidelities(qualities: Mapping[str, Quality], exact: Mapping[str, Quality], floor: Floor) -> dict[str, float]:
    """The fidelities that are known, by length; `exact` are the qualities of exact attention.

    NaN, as of outputs that overflow 16 bits, is left out: no comparison of figures holds for it.
    """
    each = {n: fidelity_of(quality, exact.get(n), floor) for n, quality in qualities.items()}
    return {n: fidelity for n, fidelity in each.items() if fidelity is not None and not math.isnan(fidelity)}


def fidelity_of(quality: Quality, exact: Quality | None, floor: Floor) -> float | None:
    """Mean cosine; exact pseudo-perplexity / this one's, at most 1; or what the floor is of. None if not known."""
    if floor.figure == "agreement":
        return quality.agreement
    if floor.figure == "kl":
        return None if quality.kl is None else math.exp(-quality.kl)
    if quality.of_exact is not None:
        return quality.of_exact
    if quality.perplexity is None:
        return quality.cosine_mean
    if exact is None or exact.perplexity is None:
        return None
    return min(exact.perplexity / quality.perplexity, 1.0)  # in this order, so that NaN stays NaN


def why_not(report: Report) -> str:
    """The reason why there is nothing to save; empty if exact attention is recommended."""
    advice = report.recommendation
    if any(name != EXACT for name in (advice.by_length or {}).values()):
        return "no one row keeps the floor at all lengths; --lengths with one of them saves the method for that length"
    if advice.too_noisy is None:
        too_short = f"the text has only {report.text['tokens']:,} tokens, so no length was judged"
        return too_short if advice.by_length == {} else ""
    where = listed([f"{n:,}" for n in advice.too_noisy])
    return f"the times were too noisy to compare speeds at {where} tokens; {_REPEAT}"
