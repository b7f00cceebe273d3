"""Advice follows the figures."""

import math
import re
from copy import deepcopy

import pytest

from subquad.tools.compare import recommend as module
from subquad.tools.compare.distinguish import distinguished
from subquad.tools.compare.judgement import fidelities, fidelity_of, why_not
from subquad.tools.compare.schema import MethodReport, Quality, RequestCost
from subquad.tools.compare.settings import CompareSettings
from subquad.tools.measure.rounds import RoundTimes
from subquad.tools.runs.floor import Floor
from subquad.tools.runs.records import from_plain, to_plain
from tests.tools.report import sample
from tests.tools.workflows.reports import read_anew


def recommend(methods, lengths, least, tokens=10_000, noise=None):
    return to_plain(module.recommend(records(methods), lengths, Floor("fidelity", least), tokens, noise or {}))


def records(methods):
    return from_plain(list[MethodReport], methods)


def row(method, fidelity, speedup, lengths=(512,), noise=1.02):
    verdict = "within the noise" if 1 / noise <= speedup <= noise else "faster" if speedup > 1 else "slower"
    cost = {"ms": 100 / speedup, "speedup": speedup} | ({} if method == "full" else {"verdict": verdict})
    return {
        "method": method,
        "settings": {"name": method.partition(":")[0]},
        "status": "exact" if method == "full" else "measured",
        "fidelity": {str(n): fidelity for n in lengths},
        "model": {str(n): cost for n in lengths},
    }


EXACT = row("full", 1.0, 1.0, (512, 2048))


def test_the_fastest_of_the_faithful_wins():
    methods = [
        EXACT,
        row("clustered", 0.9, 3.0),
        row("i-clustered", 0.995, 1.5),
        row("i-clustered:topk=64", 0.999, 1.2),
    ]
    advice = recommend(methods, [512], 0.99)
    assert advice["choice"] == "i-clustered"
    assert "1.50×" in advice["headline"]
    assert recommend(methods, [512], 0.8)["choice"] == "clustered"


KERNEL = row("full:kernel=subquad", 1.0, 1.21) | {"settings": {"name": "full", "kernel": "subquad"}}


@pytest.mark.parametrize(
    ("speedup", "noise", "choice"),
    [(1.24, 1.02, KERNEL["method"]), (1.30, 1.02, "clustered"), (1.30, 1.1, KERNEL["method"])],
)
def test_a_loss_is_not_accepted_for_a_speed_within_5_percent_or_the_noise(speedup, noise, choice):
    """A plan had 1.24× at 0.9961 where the exact kernel had 1.21× at 1.0000."""
    crude = row("clustered", 0.9961, speedup)
    advice = recommend([EXACT, KERNEL, crude], [512], 0.99, noise={512: noise})
    assert advice["choice"] == choice
    assert module.fastest(records([EXACT, KERNEL, crude]), [512], Floor(), 10_000, {512: noise})[512].method == choice


def test_gain_and_loss_are_in_one_sentence():
    closer = recommend([EXACT, KERNEL, row("clustered", 0.9961, 1.24)], [512], 0.99)["reasons"][0]
    assert closer == (
        "512 tokens: full:kernel=subquad is the closest of the fastest settings tried with fidelity ≥ 0.99: 1.21× the "
        "speed of exact attention, fidelity 1.000; clustered is within 5 % of it (1.24×) and loses more (fidelity "
        "0.996)."
    )
    faster = recommend([EXACT, KERNEL, row("clustered", 0.9961, 1.4)], [512], 0.99)["reasons"][0]
    assert faster == (
        "512 tokens: clustered is the fastest of the settings tried with fidelity ≥ 0.99: 1.40× the speed of exact "
        "attention, fidelity 0.996; it gains 16 % in speed over full:kernel=subquad, which loses less (fidelity 1.000)."
    )


def test_of_rows_that_are_equally_close_but_for_rounding_the_faster_one_wins():
    rows = [EXACT, row("clustered", 0.9999999, 1.22), row("i-clustered", 0.9999998, 1.24)]
    assert recommend(rows, [512], 0.99)["choice"] == "i-clustered"


def test_exact_attention_stays_where_nothing_is_both():
    advice = recommend([EXACT, row("clustered", 0.9, 3.0), row("i-clustered", 0.999, 0.7)], [512], 0.99)
    assert advice["choice"] == "full"
    assert advice["headline"].startswith("Stay with exact attention at 512 tokens: of the settings tried, none")
    assert "the nearest is i-clustered: 0.70×" in advice["reasons"][0]
    nothing = recommend([EXACT, row("clustered", 0.9, 3.0)], [512], 0.99)
    assert "none of the settings tried reaches fidelity ≥ 0.99; the closest is clustered" in nothing["reasons"][0]


@pytest.mark.parametrize("judged", [[512, 2048], [2048, 512]])  # the main length first, in a decoder the longest
def test_every_judged_length_at_which_exact_attention_stays_is_named(judged):
    headline = recommend([EXACT, row("clustered", 0.9, 3.0, judged)], judged, 0.99)["headline"]
    where = " and ".join(f"{n:,}" for n in judged)
    assert headline.startswith(f"Stay with exact attention at {where} tokens: of the settings tried, none")


def test_noise_is_no_gain():
    assert recommend([EXACT, row("i-clustered", 1.0, 1.05)], [512], 0.99)["choice"] == "full"
    advice = recommend([EXACT, row("i-clustered", 1.0, 1.3, noise=1.4)], [512], 0.99)
    assert advice["choice"] == "full"
    assert "the nearest is i-clustered: 1.30× the speed of exact attention (within the noise)" in advice["reasons"][0]
    assert recommend([EXACT, row("i-clustered", 1.0, 1.3, noise=1.2)], [512], 0.99)["choice"] == "i-clustered"


def test_times_that_are_too_noisy_give_no_recommendation_and_the_headline_is_about_that():
    """In one run, exact attention took four times as long as itself, and a row of 1.07× had 4.49×."""
    methods = [EXACT, row("i-clustered", 1.0, 4.49, noise=4.02)]
    advice = recommend(methods, [512], 0.99, noise={512: 4.02})
    assert (advice["choice"], advice["by_length"], advice["too_noisy"]) == ("full", {}, [512])
    assert advice["headline"] == (
        "No recommendation: the times were too noisy, and the speeds at 512 tokens are not reliable. "
        "Measure again on an idle machine."
    )
    assert "differs by 302 %" in advice["reasons"][0]
    for noise in (None, {512: module.TOO_NOISY}):
        quiet = recommend(methods, [512], 0.99, noise=noise)
        assert quiet["choice"] == "i-clustered"
        assert "too_noisy" not in quiet


@pytest.mark.parametrize(("noisy", "judged"), [(512, 2048), (2048, 512)])
def test_a_length_that_was_too_noisy_does_not_take_the_others_with_it(noisy, judged):
    methods = [EXACT, row("i-clustered", 1.0, 1.3, (512, 2048))]
    advice = recommend(methods, [512, 2048], 0.99, noise={noisy: 1.51, judged: 1.05})
    assert advice["by_length"] == {str(judged): "i-clustered"}
    assert advice["headline"].startswith("Of the settings tried, use i-clustered: 1.30×")
    assert f"at {judged:,} tokens" in advice["headline"]
    assert advice["headline"].endswith(
        f"At {noisy:,} tokens, the times were too noisy to compare speeds: measure again on an idle machine."
    )


def test_a_speedup_of_which_the_noise_is_not_known_is_no_gain():
    unknown = row("i-clustered", 1.0, 1.5)
    del unknown["model"]["512"]["verdict"]
    assert recommend([EXACT, unknown], [512], 0.99)["choice"] == "full"


SAMPLES = {
    "one faster": [row("i-clustered", 0.995, 1.5), row("clustered", 0.9, 3.0)],
    "none faster": [row("i-clustered", 0.995, 0.9), row("clustered", 0.9, 3.0)],
    "none faithful": [row("clustered", 0.9, 3.0), row("local", 0.8, 3.0)],
    "faster at a longer length": [row("i-clustered", 0.995, 1.0), row("clustered", 0.995, 2.5, (2048,))],
}


@pytest.mark.parametrize("methods", SAMPLES.values(), ids=SAMPLES)
def test_settings_were_not_searched_and_every_claim_says_so(methods):
    """The best is the best of the settings tried; the headline, each length's reason and a last one say so."""
    advice = recommend([EXACT, *methods], [512, 2048], 0.99)
    assert "of the settings tried" in advice["headline"].lower()
    *lengths, last = advice["reasons"]
    assert "other settings were not tried." in last
    for reason in lengths:
        assert "of the settings tried" in reason or "no approximation was measured; those tried are" in reason
    assert not any("no method reaches" in said for said in (advice["headline"], *lengths))


def test_the_recommendation_says_what_was_tried():
    rows = [row("clustered:clusters=4", 0.9, 1.0), row("clustered", 0.9, 1.0), row("local", 0.9, 1.0)]
    reference = row("oracle-top", 1.0, 1.0)
    last = recommend([EXACT, reference, *rows], [512, 2048], 0.99)["reasons"][-1]
    assert last == ("3 settings of 2 methods were tried at 512 and 2,048 tokens; other settings were not tried.")
    last = recommend([EXACT, rows[0]], [512, 2048], 0.99, tokens=600)["reasons"][-1]
    assert last.startswith("1 setting of 1 method was tried at 512 tokens; other")


def test_quadratic_references_are_never_recommended():
    assert (
        recommend([EXACT, row("shared-full", 1.0, 2.0), row("oracle-top", 1.0, 2.0)], [512], 0.99)["choice"] == "full"
    )


def test_exact_by_its_settings_is_no_approximation():
    exact = row("i-clustered", 1.0, 1.5, (512, 2048)) | {"settings": {"name": "i-clustered", "topk": 512}}
    advice = recommend([EXACT, exact, row("clustered", 0.9, 0.8)], [512, 2048], 0.99)
    assert advice["headline"].startswith(
        "Stay with exact attention at 512 tokens; at 2,048 tokens, of the settings tried, use i-clustered"
    )
    assert "the closest is clustered" in advice["reasons"][0]


def test_longer_lengths_are_named():
    methods = [EXACT, row("i-clustered", 0.995, 1.0), row("clustered", 0.995, 2.5, (2048,))]
    advice = recommend(methods, [512, 2048], 0.99)
    assert advice["choice"] == "full"
    assert advice["headline"].startswith(
        "Stay with exact attention at 512 tokens; at 2,048 tokens, of the settings tried, use clustered: 2.50×"
    )


def test_where_the_recommendation_differs_by_length_the_headline_says_so():
    fast = {"512": "i-clustered", "2048": "clustered", "4096": "full"}
    methods = [EXACT, row("i-clustered", 0.995, 1.5), row("clustered", 0.995, 2.5, (2048,))]
    advice = recommend(methods, [512, 2048, 4096], 0.99)
    assert advice["by_length"] == fast
    assert advice["headline"] == (
        "Of the settings tried, use i-clustered: 1.50× the speed of exact attention, fidelity 0.995 at 512 tokens; at "
        "2,048 tokens, use clustered: 2.50× the speed of exact attention, fidelity 0.995; at 4,096 tokens, stay with "
        "exact attention."
    )
    same = recommend([EXACT, row("clustered", 0.995, 2.5, (512, 2048))], [512, 2048], 0.99)
    assert same["by_length"] == {"512": "clustered", "2048": "clustered"}
    assert "2,048" not in same["headline"]


def test_nothing_measured():
    advice = recommend([EXACT, {"method": "clustered", "settings": {}, "status": "refused"}], [512], 0.99)
    assert advice["choice"] == "full"
    assert len(advice["reasons"]) == 1
    assert (
        "512 tokens: no approximation was measured; those tried are exact attention at this length"
        in advice["reasons"][0]
    )


def test_lengths_past_the_text_are_not_judged():
    methods = [EXACT, row("i-clustered", 0.995, 1.5, (512, 2048))]
    advice = recommend(methods, [512, 2048], 0.99, tokens=1000)
    assert advice["choice"] == "i-clustered"
    assert advice["reasons"][1] == "2,048 tokens: not judged, because the text has only 1,000 tokens."
    nothing = recommend(methods, [512, 2048], 0.99, tokens=100)
    assert nothing["choice"] == "full"
    assert nothing["headline"] == "No recommendation: the text has only 100 tokens; give a longer one."
    longest_first = recommend(methods, [2048, 512], 0.99, tokens=1000)["headline"]
    assert longest_first.startswith("Of the settings tried, use i-clustered: 1.50×")
    assert "2,048" not in longest_first


def test_a_text_that_is_too_short_to_judge_is_why_nothing_is_saved():
    plain = sample.encoder()
    plain["text"]["tokens"] = 100
    short = read_anew(plain, CompareSettings(min_fidelity=0.5))
    assert short["recommendation"]["headline"].startswith("No recommendation: the text has only 100 tokens")
    assert why_not(sample.record(short)) == "the text has only 100 tokens, so no length was judged"


def test_a_request_that_fp32_has_no_steps_for_names_its_baseline():
    """In long prompts, exact attention in fp32 runs once, without steps."""
    exact, tail = "full in bf16", "clustered-tail in bf16"
    prefills = RoundTimes({"full": [10.0], exact: [5.0, 5.1], tail: [4.0, 4.05]}, {}, exact)
    requests = RoundTimes({exact: [7.5, 7.6], tail: [6.5, 6.55]}, {}, exact)

    def performance(name):
        request = RequestCost(**vars(requests.cost(name, 1.05, exact)), new_tokens=128)
        measured = MethodReport(
            method=name,
            settings={"name": name.partition(" ")[0]},
            status="measured",
            dtype="bf16",
            fidelity={"8192": 1.0},
            model={"8192": prefills.cost(name, 1.05, exact)},
            request={"8192": request},
        )
        return module.describe_performance(measured, "8192", Floor("kl", 0.002))

    assert performance(exact) == "1.98× the speed of exact attention in fp32 to the first token, KL 0"
    assert re.fullmatch(
        r"2\.\d\d× the speed of exact attention in fp32 and 1\.2\d× that in bf16 to the first token and "
        r"1\.1\d× that in bf16 in a whole request with 128 new tokens, KL 0",
        performance(tail),
    )


@pytest.mark.parametrize(("floor", "kept", "missed", "shown"), [
    (Floor("fidelity", 0.99), 0.9904, 0.98961, ("fidelity 0.990", "fidelity 0.9896")),
    (Floor("fidelity", 0.9992), 0.9993, 0.9991, ("fidelity 0.9993", "fidelity 0.999")),
    (Floor("agreement", 0.99), 0.99, 0.9896, ("same top token 0.990", "same top token 0.9896")),
    (Floor("kl", 0.002), math.exp(-0.00196), math.exp(-0.002049), ("KL 0.002", "KL 0.00205")),
])  # fmt: skip
def test_a_figure_is_printed_on_its_side_of_the_floor(floor, kept, missed, shown):
    assert kept >= floor.least > missed
    assert (floor.describe(kept), floor.describe(missed)) == shown


def test_methods_that_are_exact_by_their_causal_blocks_are_no_approximation_in_a_module():
    """Attention by halves forms its diagonal block of 1,024 tokens exactly."""
    tail, floor = row("clustered-tail", 1.0, 1.25), Floor("fidelity", 0.99, causal=True)
    two = records([EXACT, tail, tail | {"method": "clustered-tail:clusters=64,topk=96"}])
    rows, blind = distinguished(two, [512], floor, {})
    assert not blind
    advice = module.recommend(rows, [512], floor, 10_000, {})
    assert advice.choice == "full"
    assert "no approximation was measured; those tried are exact attention at this length" in advice.reasons[0]
    assert distinguished(two, [512], Floor("fidelity", 0.99), {})[1]


def test_a_plan_is_not_exact_because_its_most_frequent_method_is():
    floor, plan = Floor("kl", 0.002), row("plan:mine", math.exp(-0.001), 2.0) | {"plan": "mine"}
    plan["settings"] = {"name": "clustered-tail"}
    other = plan | {"method": "plan:other"}
    advice = module.recommend(records([EXACT, plan]), [512], floor, 10_000, {})
    assert advice.choice == "plan:mine"
    same = [each | {"fidelity": {"512": 1.0}} for each in (plan, other)]
    assert "both approximations" in distinguished(records([EXACT, *same]), [512], floor, {})[1][512]


def test_a_fidelity_that_is_nan_is_left_out():
    """Python's min(1.0, nan) is 1.0, and its max is the first of two where the other is NaN."""
    nan, exact = Quality(perplexity=math.nan), Quality(perplexity=5.0)
    assert math.isnan(fidelity_of(nan, exact, Floor()))
    assert fidelities({"48": nan, "96": exact}, {"48": exact, "96": exact}, Floor()) == {"96": 1.0}
    assert fidelities({"48": Quality(kl=math.nan)}, {}, Floor("kl", 0.002)) == {}
    assert Floor("kl", 0.002).describe(math.nan) == "KL nan"
    row_without = row("clustered", 1.0, 1.5) | {"fidelity": {}}
    for rows in ([row_without, row("i-clustered", 0.95, 1.2)], [row("i-clustered", 0.95, 1.2), row_without]):
        advice = recommend([EXACT, *rows], [512], 0.99)
        assert "the closest is i-clustered" in advice["reasons"][0]
        assert advice["choice"] == "full"
        assert judged(rows)["headline"].startswith("Stay with exact attention")


# ---------------------------------------------------------------------- fidelities that prove nothing


def judged(rows, least=0.99, without=None):
    floor, bottoms = Floor("fidelity", least), {} if without is None else {512: without}
    told, blind = distinguished(records([EXACT, *rows]), [512], floor, bottoms)
    return to_plain(module.recommend(told, [512], floor, 10_000, {}, blind=blind))


def test_methods_that_all_tie_at_the_top_leave_exact_attention():
    rows = [row("clustered", 0.99999, 5.0), row("i-clustered", 0.999999, 2.0)]
    advice = judged(rows, without=0.97)
    assert advice["choice"] == "full"
    assert advice["headline"].startswith(
        "This comparison does not tell methods apart. At 512 tokens, both approximations have the fidelity of exact "
        "attention, 1.0000 (without attention: 0.9700)."
    )
    assert judged([*rows, KERNEL])["choice"] == "full:kernel=subquad"
    assert judged([*rows, KERNEL])["headline"].startswith("This comparison does not tell methods apart.")
    assert judged(rows[:1])["choice"] == "clustered"  # there is nothing to tell it apart from
    assert judged([*rows, row("local", 0.9998, 5.1)])["choice"] == "clustered"


def test_a_loss_must_be_a_tenth_of_that_without_attention():
    crude, close = row("clustered", 0.991, 5.0), row("i-clustered", 0.9991, 2.0)
    assert judged([crude, close], without=0.9)["choice"] == "clustered"
    advice = judged([crude, close], without=0.95)
    assert advice["choice"] == "i-clustered"
    assert advice["reasons"][0] == (
        "512 tokens: the fidelity without any attention is still 0.9500, and clustered loses more than a tenth as much."
    )
    neither = judged([crude, close], without=0.995)
    assert neither["choice"] == "full"
    assert neither["headline"].startswith("This comparison does not tell methods apart. At 512 tokens, the fidelity")
    assert "clustered and i-clustered lose more than a tenth as much" in neither["headline"]


def test_a_metric_below_zero_proves_as_much_as_another():
    """Such as the negative distance to the exact output, of which exact attention has 0."""
    exact = row("full", 0.0, 1.0)
    rows = [exact, row("clustered", -0.4, 5.0), row("i-clustered", -0.001, 2.0)]
    floor = Floor("fidelity", -0.5)
    for without, choice in ((-1.0, "clustered"), (-0.05, "i-clustered"), (-0.005, "full")):
        told, blind = distinguished(records(rows), [512], floor, {512: without})
        assert module.recommend(told, [512], floor, 10_000, {}, blind=blind).choice == choice


def test_a_stored_report_that_does_not_know_its_bottom_is_judged_as_one_without_it():
    plain = sample.encoder()
    plain["model"]["kind"] = "masked-lm"
    advice = [
        read_anew(plain | {"without_attention": bottoms}, CompareSettings(min_fidelity=0.5))["recommendation"]
        for bottoms in (
            {},
            {str(n): {"perplexity": 20.0} for n in plain["settings"]["lengths"]},
            {str(n): {"perplexity": 20.0, "of_exact": 1.0} for n in plain["settings"]["lengths"]},
        )
    ]
    assert advice[1] == advice[0]
    assert advice[2] != advice[0]


def test_nothing_is_predicted_from_times_that_are_too_noisy():
    plain = sample.encoder()

    def predictions() -> list[str]:
        reasons = read_anew(plain, CompareSettings(min_fidelity=0.5))["recommendation"]["reasons"]
        return [reason for reason in reasons if "it is predicted to run" in reason]

    assert predictions()
    plain["noise"]["model"] = dict.fromkeys(list(plain["noise"]["model"])[1:], module.TOO_NOISY + 0.1)
    assert not predictions()


def test_the_range_of_a_crossing_is_that_of_the_reports_noise():
    plain = deepcopy(sample.encoder())
    fast = next(row for row in plain["methods"] if row["method"] == "clustered:clusters=25")
    fast["model"]["512"]["ms"] *= 1.1
    fast["model"]["2048"]["ms"] *= 1.3

    def crossings() -> list[str]:
        reasons = read_anew(plain, CompareSettings(min_fidelity=0.5))["recommendation"]["reasons"]
        return [reason for reason in reasons if "overtakes full" in reason]

    plain["noise"]["model"] = dict.fromkeys(plain["noise"]["model"], 1.2)
    assert "with the noise of this run" in crossings()[0]
    plain["noise"]["model"] = dict.fromkeys(plain["noise"]["model"], 1.0)
    assert "with the noise of this run" not in crossings()[0]
