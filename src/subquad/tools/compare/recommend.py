"""Choose a method from the figures of a comparison, with reasons."""

from collections.abc import Mapping, Sequence

from subquad.core.spelling import listed
from subquad.methods import Full, from_dict
from subquad.methods.full import EXACT
from subquad.tools.compare.schema import MethodReport, Recommendation, RequestCost
from subquad.tools.measure.exact_limits import exact_up_to
from subquad.tools.measure.noise import Verdict, percent
from subquad.tools.measure.tradeoff import EQUAL, SIMILAR, closest_of_fast
from subquad.tools.models.dtypes import FP32, TORCH
from subquad.tools.runs.floor import Floor

MARGIN = 1.1  # a smaller speed-up is not worth a change
# Exact attention against itself, as a factor, above which no speed is judged. Methods seldom gain more than this at the
# usual lengths, and the fastest of a dozen rows is then the one that the other work on the machine hit least.
TOO_NOISY = 1.5
MEASURE_AGAIN = "measure again on an idle machine"
REMEDY = "Use trained weights, more inputs, or a metric that shows the difference."


def recommend(
    methods: Sequence[MethodReport],
    lengths: Sequence[int],
    floor: Floor,
    tokens: int,
    noise: Mapping[int, float],
    remedy: str = MEASURE_AGAIN,
    blind: Mapping[int, str] | None = None,
) -> Recommendation:
    """The headline and the reason for each length, from the choices of `fastest`.

    The recommendation is about the settings that were tried; no others are searched. Lengths above the text's `tokens`
    are not judged, and neither are those whose `noise` (how far exact attention differs from itself there, as a factor)
    exceeds `TOO_NOISY`; `remedy` is what to do about that. `blind` are the clauses of `distinguish.distinguished`,
    which also gives the `methods`. `methods` and the result have the types of `compare.schema`.
    """
    measured = [m for m in methods if m.status == "measured" and _is_candidate(m)]
    best = fastest(methods, lengths, floor, tokens, noise)
    judged, main_length, too_short = list(best), lengths[0], f"the text has only {tokens:,} tokens"
    noisy = {n: noise[n] for n in lengths if n <= tokens and n not in best}
    known = {n: why for n, why in (blind or {}).items() if n <= tokens}
    unproven = {n: why for n, why in known.items() if _is_exact(best.get(n))}
    reasons = [f"{n:,} tokens: {why}." for n, why in known.items() if n not in unproven]
    reasons += [
        _reason(_approximate_at(measured, n, floor), best[n], n, floor, noise.get(n, 1.0))
        for n in judged
        if n not in unproven or best[n] is not None
    ]
    reasons += [
        f"{n:,} tokens: not judged, because exact attention timed against itself differs by {percent(factor - 1)}, and "
        f"more than {percent(TOO_NOISY - 1)} is too much to compare speeds."
        for n, factor in noisy.items()
    ]
    reasons += [f"{n:,} tokens: not judged, because {too_short}." for n in lengths if n > tokens]
    reasons += [_faster_others(methods, best[n], n, floor) for n in judged]
    if measured:
        reasons.append(_tried(measured, judged))
    names = {length: EXACT if method is None else method.method for length, method in best.items()}
    shown = "is shown to have" if unproven else "has"
    headline = _headline(best, judged[0] if judged else main_length, floor, shown)
    if noisy:
        headline = _with_noise(headline, list(noisy), bool(best), remedy)
    elif not best:
        headline = f"No recommendation: {too_short}; give a longer one."
    if unproven:
        each = " ".join(f"At {n:,} tokens, {why}." for n, why in unproven.items())
        headline = f"This comparison does not tell methods apart. {each} {REMEDY} {headline}"
    return Recommendation(
        choice=names.get(main_length, EXACT),
        by_length={str(length): name for length, name in names.items()},
        headline=headline,
        reasons=[reason for reason in reasons if reason],
        too_noisy=list(noisy) or None,
    )


def _with_noise(headline: str, noisy: Sequence[int], is_any_judged: bool, remedy: str) -> str:
    """The headline, or none, and that the times were too noisy at these lengths."""
    where = f"{listed([f'{n:,}' for n in noisy])} tokens"
    if is_any_judged:
        return f"{headline} At {where}, the times were too noisy to compare speeds: {remedy}."
    return (
        f"No recommendation: the times were too noisy, and the speeds at {where} are not reliable. "
        f"{remedy[0].upper()}{remedy[1:]}."
    )


def _headline(best: Mapping[int, MethodReport | None], main_length: int, floor: Floor, shown: str) -> str:
    """The advice for the main length, and for the others where it differs; `shown`: "has", or a weaker verb."""
    chosen = best.get(main_length)
    if not any(best.values()):
        where = listed([f"{length:,}" for length in best] or [f"{main_length:,}"])
        why = f"of the settings tried, none {shown} {floor} and is clearly faster"
        return f"Stay with exact attention at {where} tokens: {why}."
    if chosen is None:
        headline = f"Stay with exact attention at {main_length:,} tokens"
    else:
        performance = describe_performance(chosen, str(main_length), floor)
        headline = f"Of the settings tried, use {chosen.method}: {performance} at {main_length:,} tokens"
    caveat = "" if chosen is not None else ", of the settings tried"  # once is enough
    for length, method in best.items():
        if method is None and chosen is not None:
            headline += f"; at {length:,} tokens, stay with exact attention"
        elif method is not None and (chosen is None or method.method != chosen.method):
            performance = describe_performance(method, str(length), floor)
            headline += f"; at {length:,} tokens{caveat}, use {method.method}: {performance}"
            caveat = ""
    return f"{headline}."


def fastest(
    methods: Sequence[MethodReport], lengths: Sequence[int], floor: Floor, tokens: int, noise: Mapping[int, float]
) -> dict[int, MethodReport | None]:
    """For each length that is judged, the row to use: fast, and it keeps the floor; None if none is clearly faster.

    Of the rows whose speeds are within 5 %, or within the noise, of the fastest, it is the closest to exact attention.
    A length above the text's `tokens` is not judged, because repeated text makes queries similar, which favours
    clustering, and neither is one whose `noise` exceeds `TOO_NOISY`. A method is not a candidate at a length where its
    settings make it exact attention, because it is faster there only by chance.
    """
    measured = [m for m in methods if m.status == "measured" and _is_candidate(m)]
    judged = [length for length in lengths if length <= tokens and noise.get(length, 1.0) <= TOO_NOISY]
    return {n: _best(_approximate_at(measured, n, floor), str(n), floor, noise.get(n, 1.0)) for n in judged}


def _approximate_at(methods: Sequence[MethodReport], length: int, floor: Floor) -> list[MethodReport]:
    """Those that are not the baseline's attention there; exact attention in another dtype is one of them.

    A method whose settings make it exact attention at this length is left to the rows that are named so.
    """

    def is_the_baselines(m: MethodReport) -> bool:
        if is_full(m):
            return (m.dtype or FP32) == FP32
        return is_exact_by_settings(m, length, floor)

    return [m for m in methods if not is_the_baselines(m)]


def is_exact_by_settings(method: MethodReport, length: int, floor: Floor) -> bool:
    """True if its settings make a row exact attention at a length; not of a plan, whose layers have settings each."""
    most = exact_up_to(from_dict(method.settings), floor.is_causal, TORCH[method.dtype or FP32])
    return method.plan is None and most >= length


def _tried(measured: Sequence[MethodReport], lengths: Sequence[int]) -> str:
    """The scope of the recommendation: how many settings of how many methods were tried, and at which lengths."""
    rows, methods = len(measured), len({m.settings.get("name") for m in measured})
    counted = f"{_count(rows, 'setting')} of {_count(methods, 'method')} {'were' if rows > 1 else 'was'} tried"
    where = f" at {listed([f'{length:,}' for length in lengths])} tokens" if lengths else ""
    return f"{counted}{where}; other settings were not tried."


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number > 1 else ''}"


def _is_candidate(method: MethodReport) -> bool:
    """Reference methods compute every logit, so they are faster than exact attention only by chance."""
    return is_full(method) or not from_dict(method.settings).traits.quadratic_baseline


def _best(methods: Sequence[MethodReport], length: str, floor: Floor, noise: float) -> MethodReport | None:
    return closest_of_fast(
        _fast(methods, length, floor),
        lambda m: _speedup(m, length),
        lambda m: -m.fidelity_at(length),
        1.0 - floor.least,
        noise,
    )


def _fast(methods: Sequence[MethodReport], length: str, floor: Floor) -> list[MethodReport]:
    """The rows that keep the floor and are clearly faster than exact attention."""
    return [m for m in methods if is_faithful(m, length, floor) and is_faster(m, length)]


def _is_exact(method: MethodReport | None) -> bool:
    """True if a choice is exact attention, by whatever kernel and in whatever dtype."""
    return method is None or is_exact_kernel(method)


def is_exact_kernel(method: MethodReport) -> bool:
    """True if a row is exact attention by its name, such as `full:kernel=subquad`."""
    return method.settings.get("name") == EXACT and _is_one_method(method)


def is_faithful(method: MethodReport, length: str, floor: Floor) -> bool:
    """True if a row was measured at a length and keeps the floor there."""
    return method.fidelity_at(length) >= floor.least


def is_faster(method: MethodReport, length: str) -> bool:
    """Faster by the margin, and by more than the noise; and not slower in a whole request, if that was measured."""
    if method.cost("request", length).over_fp32[1] == "slower":
        return False
    return _speedup(method, length) >= MARGIN and _verdict(method, length) == "faster"


def _reason(methods: Sequence[MethodReport], best: MethodReport | None, length: int, floor: Floor, noise: float) -> str:
    at, minimum = str(length), str(floor)
    if best is not None:
        return f"{length:,} tokens: {_choice(best, _fast(methods, at, floor), at, floor, noise)}."
    timed = [m for m in methods if at in (m.model or {}) and at in (m.fidelity or {})]
    if not timed:
        why = (
            "those tried are exact attention at this length, reference methods, refused, left out or without a fidelity"
        )
        return f"{length:,} tokens: no approximation was measured; {why}."
    close = [m for m in timed if m.fidelity_at(at) >= floor.least]
    if close:
        fastest = max(close, key=lambda m: _speedup(m, at))
        return (
            f"{length:,} tokens: of the settings tried, none with {minimum} is clearly faster than exact attention; "
            f"the nearest is {fastest.method}: {describe_performance(fastest, at, floor)}."
        )
    closest = max(timed, key=lambda m: m.fidelity_at(at))
    return (
        f"{length:,} tokens: none of the settings tried reaches {floor}; "
        f"the closest is {closest.method}: {describe_performance(closest, at, floor)}."
    )


def _faster_others(methods: Sequence[MethodReport], best: MethodReport | None, length: int, floor: Floor) -> str:
    """The rows that are not subquad's and are faster than the choice at a length; empty if none is."""
    at, chosen = str(length), 1.0 if best is None else _speedup(best, str(length))
    others = [m for m in methods if m.status == "other" and is_faithful(m, at, floor)]
    faster = [m for m in others if _speedup(m, at) > chosen and _verdict(m, at) == "faster"]
    shown = listed([f"{m.method}: {describe_performance(m, at, floor)}" for m in faster])
    return f"{length:,} tokens: attention that is not subquad's was faster still: {shown}." if faster else ""


def _choice(best: MethodReport, fast: Sequence[MethodReport], at: str, floor: Floor, noise: float) -> str:
    """The reason for this row of the fast ones, with what it gains and loses in comparison with the next one."""
    performance = describe_performance(best, at, floor)
    top = max(fast, key=lambda m: _speedup(m, at))
    if top is not best:
        similar = "within 5 % of it" if noise <= SIMILAR else "not faster beyond the noise"
        return (
            f"{best.method} is the closest of the fastest settings tried with {floor}: {performance}; "
            f"{top.method} is {similar} ({_speedup(top, at):.2f}×) and loses more "
            f"({floor.describe(top.fidelity_at(at))})"
        )
    reason = f"{best.method} is the fastest of the settings tried with {floor}: {performance}"
    closest = max(fast, key=lambda m: (m.fidelity_at(at), _speedup(m, at)))
    if closest.fidelity_at(at) - best.fidelity_at(at) <= EQUAL * (1.0 - floor.least):
        return reason
    return (
        f"{reason}; it gains {percent(_speedup(best, at) / _speedup(closest, at) - 1)} in speed over "
        f"{closest.method}, which loses less ({floor.describe(closest.fidelity_at(at))})"
    )


def describe_performance(method: MethodReport, length: str, floor: Floor) -> str:
    """The speed and the fidelity of a method at a length, in words."""
    tie = _verdict(method, length) == "within the noise"
    cost = method.cost("model", length)
    baseline = "exact attention" if cost.speedup_fp32 is None else "exact attention in fp32"
    speed = f"{_speedup(method, length):.2f}× the speed of {baseline}{' (within the noise)' if tie else ''}"
    if cost.speedup_fp32 is not None and not is_full(method):
        speed += f" and {cost.speedup:.2f}× that in {method.dtype}"
    return f"{speed}{_of_request(method, length)}, {floor.describe(method.fidelity_at(length))}"


def _of_request(method: MethodReport, length: str) -> str:
    """The speed in a whole request, in words after the speed to the first token; empty if it was not measured."""
    request = (method.request or {}).get(length)
    if request is None:
        return ""
    if request.speedup_fp32 is None and method.cost("model", length).speedup_fp32 is not None:
        return _of_request_in_dtype(method, request)  # exact attention in fp32 has no steps at long lengths
    faster, verdict = request.over_fp32
    speed = f"{faster:.2f}×{' (within the noise)' if verdict == 'within the noise' else ''}"
    if request.speedup_fp32 is not None and not is_full(method):
        speed += f" and {request.speedup:.2f}×"
    return f" to the first token and {speed} in a whole request with {request.new_tokens:,} new tokens"


def _of_request_in_dtype(method: MethodReport, request: RequestCost) -> str:
    """The speed in a whole request over exact attention in the same dtype; nothing of exact attention in it."""
    if is_full(method):
        return " to the first token"
    tie = " (within the noise)" if request.verdict == "within the noise" else ""
    speed = f"{request.speedup:.2f}× that in {method.dtype}{tie}"
    return f" to the first token and {speed} in a whole request with {request.new_tokens:,} new tokens"


def is_full(method: MethodReport) -> bool:
    """True if the row is the model's own exact attention, in whatever dtype."""
    return from_dict(method.settings) == Full() and _is_one_method(method)


def _is_one_method(method: MethodReport) -> bool:
    """True if the row's settings are all that runs, which they are not in a plan or in attention of another kind."""
    return method.status not in ("other", "refused") and method.plan is None


def _speedup(method: MethodReport, length: str) -> float:
    """Over exact attention in fp32."""
    return method.cost("model", length).over_fp32[0] if length in (method.model or {}) else 0.0


def _verdict(method: MethodReport, length: str) -> Verdict | None:
    return method.cost("model", length).over_fp32[1]
