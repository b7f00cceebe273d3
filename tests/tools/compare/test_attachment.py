"""One model from the recommendations of several lengths."""

import pytest

from subquad.methods import parse_method
from subquad.tools.compare import attachment as module
from subquad.tools.compare.recommend import recommend
from subquad.tools.compare.schema import Attachment, MethodReport
from subquad.tools.runs.floor import Floor
from subquad.tools.runs.records import from_plain, to_plain

EMBEDDINGS, NEXT_TOKENS = Floor("fidelity", 0.99), Floor("agreement", 0.99)
LENGTHS = (512, 2048, 4096)


def row(method, speedups, fidelities=(1.0, 1.0, 1.0), **more):
    """A row with speed-ups over exact attention in fp32 at 512, 2,048 and 4,096 tokens."""
    name, _, dtype = method.partition(" in ")
    costs = [{"speedup": x, "verdict": "faster" if x > 1.02 else "slower" if x < 0.98 else "within the noise"}
             for x in speedups]  # fmt: skip
    if dtype:
        costs = [{**cost, "speedup_fp32": cost["speedup"], "verdict_fp32": cost["verdict"]} for cost in costs]
    if name == "full":
        costs = [{key: value for key, value in cost.items() if key != "verdict"} for cost in costs]
    return {
        "method": method,
        "settings": parse_method(name).to_dict(),
        "status": "exact" if method == "full" else "measured",
        "dtype": dtype or "fp32",
        "layers": [0, 1],
        "fidelity": dict(zip(map(str, LENGTHS), fidelities, strict=True)),
        "model": dict(zip(map(str, LENGTHS), costs, strict=True)),
        **more,
    }


EXACT, EXACT_BF16 = row("full", (1.0, 1.0, 1.0)), row("full in bf16", (2.0, 2.4, 2.5))
CLUSTERED = row("clustered", (0.9, 1.5, 2.0), crossover=700.5)


def attached(*methods, floor=EMBEDDINGS, limit=512, noise=None):
    made = module.attachment(records(EXACT, *methods), LENGTHS, floor, 10_000, noise or {}, limit)
    return to_plain(made)


def records(*methods):
    return from_plain(list[MethodReport], methods)


def steps_of(*methods, **more):
    return (attached(*methods, **more) or {}).get("steps")


def test_exact_attention_up_to_the_crossover_and_what_is_recommended_from_there_on():
    found = attached(CLUSTERED)
    assert found == {"dtype": "fp32", "steps": {"0": "full", "701": "clustered"}, "lengths": [2048, 4096]}
    assert module.described(from_plain(Attachment, found)) == "full below 701 tokens and clustered from 701 tokens on"
    for crossover, start in ((None, 2048), (100.0, 513), (3000.0, 2048)):
        assert steps_of(CLUSTERED | {"crossover": crossover}) == {"0": "full", str(start): "clustered"}


def test_each_length_runs_what_is_recommended_there():
    """Exact attention at 512 tokens and clusters at 2,048, as on an encoder in bf16."""
    tail = row("clustered-tail in bf16", (1.3, 2.7, 2.0), (1.0, 1.0, 1.0))
    found = attached(EXACT_BF16, tail)
    assert found["steps"] == {"0": "full in bf16", "2048": "clustered-tail in bf16", "4096": "full in bf16"}
    assert (found["dtype"], found["lengths"]) == ("bf16", [512, 2048, 4096])
    assert "note" not in found
    assert module.described(from_plain(Attachment, found)) == (
        "full below 2,048 tokens, clustered-tail from 2,048 tokens on and full from 4,096 tokens on, in bf16"
    )
    by_length = recommend(records(EXACT, EXACT_BF16, tail), LENGTHS, EMBEDDINGS, 10_000, {}).by_length
    steps = {int(start): name for start, name in found["steps"].items()}
    assert {str(n): module.running_at(steps, n) for n in LENGTHS} == by_length


def test_a_method_that_loses_too_much_in_longer_inputs_ends_where_it_was_recommended():
    early = row("clustered", (1.5, 2.0, 3.0), (1.0, 0.9, 0.9))
    assert steps_of(early, limit=8192) == {"0": "clustered", "513": "full"}
    assert steps_of(early, limit=512) == {"0": "clustered"}  # the model accepts no longer ones


def test_where_exact_attention_stays_there_is_nothing_to_attach():
    assert attached(row("clustered", (1.0, 1.0, 1.0))) is None
    assert attached(CLUSTERED, noise=dict.fromkeys(LENGTHS, 2.0)) is None


def test_a_model_has_one_dtype_and_it_is_said_where_another_one_was_recommended():
    kernel, tail = row("full:kernel=subquad", (2.2, 1.0, 1.0)), row("clustered-tail in bf16", (1.3, 2.7, 2.9))
    found = attached(kernel, EXACT_BF16, tail)
    assert found["steps"] == {"0": "full in bf16", "2048": "clustered-tail in bf16"}
    assert found["note"] == (
        "One model for all lengths runs full in bf16 at 512 tokens, because a model has one dtype."
    )


def test_a_dtype_in_which_exact_attention_loses_too_much_is_not_taken():
    coarse, tail = (
        row("full in bf16", (2.0, 2.4, 2.5), (0.98, 1.0, 1.0)),
        row("clustered-tail in bf16", (1.3, 2.7, 2.9)),
    )
    found = attached(coarse, tail | {"fidelity": {"512": 0.98, "2048": 1.0, "4096": 1.0}}, CLUSTERED)
    assert (found["dtype"], found["steps"]) == ("fp32", {"0": "full", "701": "clustered"})


def test_in_a_causal_language_model_one_method_runs_at_all_lengths():
    """`by-length` would run exact attention on the whole prompt too, and be slower than either."""
    found = attached(CLUSTERED, floor=NEXT_TOKENS, limit=8192)
    assert found["steps"] == {"0": "clustered"}
    assert found["lengths"] == [2048, 4096]
    assert found["note"] == (
        "One model for all lengths runs clustered at 512 tokens, because by-length would run both methods on a long "
        "prompt."
    )
    far = row("clustered", (0.9, 1.5, 2.0), (0.9, 1.0, 1.0))
    assert attached(far, floor=NEXT_TOKENS, limit=8192) is None  # it would lose too much in short prompts


@pytest.mark.parametrize(
    "change",
    [{"plan": "folder"}, {"settings": {"name": "by-length", "steps": "0:full+9:local"}}],
    ids=["plan", "mixture"],
)
def test_a_plan_or_a_mixture_stays_as_it_is(change):
    assert steps_of(CLUSTERED | change) == {"0": "clustered"}


@pytest.mark.parametrize("noisy", LENGTHS)
def test_what_runs_at_a_length_that_was_too_noisy_keeps_the_floor(noisy):
    fidelities = [0.8 if length == noisy else 1.0 for length in LENGTHS]
    found = attached(row("clustered", (2.0, 2.0, 2.0), fidelities), noise={noisy: 1.6}, limit=8192)
    steps = {int(start): name for start, name in found["steps"].items()}
    assert module.running_at(steps, noisy) == "full"
    assert found["lengths"] == [length for length in LENGTHS if length != noisy]
