"""Advice follows the figures."""

from functools import partial

from subquad.workflows import recommend as module

recommend = partial(module.recommend, tokens=10_000)


def row(method, fidelity, speedup, lengths=(512,), noise=0.01):
    ms = 100 / speedup
    cost = {"ms": ms, "ms_low": ms * (1 - noise), "ms_high": ms * (1 + noise), "speedup": speedup}
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


def test_exact_attention_stays_where_nothing_is_both():
    advice = recommend([EXACT, row("clustered", 0.9, 3.0), row("i-clustered", 0.999, 0.7)], [512], 0.99)
    assert advice["choice"] == "full"
    assert advice["headline"] == "Stay with exact attention at 512 tokens."
    assert "the nearest is i-clustered: 0.70×" in advice["reasons"][0]
    nothing = recommend([EXACT, row("clustered", 0.9, 3.0)], [512], 0.99)
    assert "no method reaches fidelity 0.99; the closest is clustered" in nothing["reasons"][0]


def test_noise_is_no_gain():
    assert recommend([EXACT, row("i-clustered", 1.0, 1.05)], [512], 0.99)["choice"] == "full"
    assert recommend([EXACT, row("i-clustered", 1.0, 1.3, noise=0.5)], [512], 0.99)["choice"] == "full"


def test_quadratic_yardsticks_are_never_recommended():
    assert (
        recommend([EXACT, row("shared-full", 1.0, 2.0), row("oracle-top", 1.0, 2.0)], [512], 0.99)["choice"] == "full"
    )


def test_exact_by_its_settings_is_no_approximation():
    exact = row("i-clustered", 1.0, 1.5, (512, 2048)) | {"settings": {"name": "i-clustered", "topk": 512}}
    advice = recommend([EXACT, exact, row("clustered", 0.9, 0.8)], [512, 2048], 0.99)
    assert advice["headline"].startswith("Stay with exact attention at 512 tokens; at 2048 tokens use i-clustered")
    assert "the closest is clustered" in advice["reasons"][0]


def test_longer_lengths_are_named():
    methods = [EXACT, row("i-clustered", 0.995, 1.0), row("clustered", 0.995, 2.5, (2048,))]
    advice = recommend(methods, [512, 2048], 0.99)
    assert advice["choice"] == "full"
    assert advice["headline"].startswith("Stay with exact attention at 512 tokens; at 2048 tokens use clustered: 2.50×")


def test_nothing_measured():
    advice = recommend([EXACT, {"method": "clustered", "settings": {}, "status": "refused"}], [512], 0.99)
    assert advice["choice"] == "full"
    assert "no method but the yardsticks was measured" in advice["reasons"][0]


def test_lengths_past_the_text_are_not_judged():
    methods = [EXACT, row("i-clustered", 0.995, 1.5, (512, 2048))]
    advice = module.recommend(methods, [512, 2048], 0.99, tokens=1000)
    assert advice["choice"] == "i-clustered"
    assert advice["reasons"][1] == "2048 tokens: not judged, the text has 1000 tokens only."
    assert module.recommend(methods, [512, 2048], 0.99, tokens=100)["choice"] == "full"
