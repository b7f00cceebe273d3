"""Plans for batches of texts with lengths of their own: how they are drawn, what runs in them, and what is reported."""

import random
from dataclasses import replace

import pytest
import torch

import subquad as sq
from subquad.core.errors import InputError
from subquad.hf.plans import Plan
from subquad.tools.models.next_tokens import Prefill
from subquad.tools.models.passages import FEWEST_PASSAGES, TokenizedText
from subquad.tools.models.pretrained import Pretrained
from subquad.tools.plan.arguments import check_settings
from subquad.tools.plan.length import ShorterLengths
from subquad.tools.plan.loads import batch_load, batches_by_length, next_token_loss, padded_length
from subquad.tools.plan.schema import BatchSizes, PlannedLength, Verification
from subquad.tools.plan.settings import FROM_TEXT, PlanSettings
from subquad.tools.plan.tables import tried
from subquad.tools.runs.options import as_command, from_arguments
from tests.library.hf.models import build
from tests.tools.report import sample_plan


class Plain(Pretrained):
    """A model without special tokens."""

    def wrap(self, ids, length):
        return list(ids)[:length]


PLAIN = Plain("plain", None, None, "causal-lm", "mean", None)
SIZES = {"batch": 8, "tokens": 284.2, "padded": 490.7}


def text_of(lengths):
    tokens = list(range(sum(lengths)))
    return TokenizedText([], [], tokens, list(lengths))


def batches_of(widths):
    return [[[0] * 16, [0] * width] for width in widths]


@pytest.mark.parametrize("seed", [0, 1])
def test_no_piece_is_in_two_batches_until_all_were_used(seed):
    reading = text_of(
        [16 + i for i in range(10)] + [130, 3]
    )  # 130 tokens are cut into two pieces of 64; 2 are left out
    batches = reading.batches(PLAIN, 64, None, 5, seed)
    assert [len(batch) for batch in batches] == [5, 5]
    used = [tuple(piece) for batch in batches for piece in batch]
    assert len(set(used)) == 10
    more = reading.batches(PLAIN, 64, 5, 5, seed)
    assert more[:2] == batches
    assert len(more) == 5
    assert batches != reading.batches(PLAIN, 64, None, 5, seed + 2)


@pytest.mark.parametrize("count", [5, 9, 10, 14, 15, 16, 40, 100])
@pytest.mark.parametrize("kind", ["all", "equal", "steps", "most equal"])
def test_lengths_from_batches_have_five_each_and_cover_all(count, kind):
    draw = random.Random(count)
    width = {
        "all": lambda i: draw.randint(16, 512),
        "equal": lambda i: 512,
        "steps": lambda i: (64, 128, 256, 512)[i % 4],
        "most equal": lambda i: 512 if i > 2 else 16 + i,
    }[kind]
    batches = batches_of([width(i) for i in range(count)])
    groups = batches_by_length(batches)
    assert list(groups) == sorted(groups)
    assert len(groups) <= 3
    assert max(groups) == max(map(padded_length, batches))
    assert all(len(group) >= FEWEST_PASSAGES for group in groups.values())
    assert sorted(map(padded_length, batches)) == sorted(padded_length(b) for group in groups.values() for b in group)
    for before, (length, group) in zip([0, *groups], groups.items(), strict=False):
        assert all(before < padded_length(batch) <= length for batch in group)
        assert group == [batch for batch in batches if batch in group]  # in their order
    if kind == "all" and count >= 15:
        assert len(groups) == 3


@pytest.mark.parametrize(("widths", "shorter", "number"), [([20] * 4, 0, 4), ([20] * 9 + [50], 32, 1)])
def test_too_few_batches_of_a_length_are_refused(widths, shorter, number):
    message = rf"{number} batches of 2 of the text are padded to {shorter + 1} to 64 tokens, but .* five"
    with pytest.raises(InputError, match=message):
        batch_load(PLAIN, batches_of(widths), shorter, 64, "fidelity")


@pytest.mark.parametrize("positions", [100, 5])
def test_the_loss_of_next_tokens_leaves_padding_out(positions):
    torch.manual_seed(0)
    valid = torch.arange(12)[None] < torch.tensor([[12], [7]])
    exact, other = (Prefill(torch.randn(2, 12, 9), valid=valid) for _ in range(2))
    loss = next_token_loss(PLAIN, "fidelity", positions)
    before = loss(other, exact)
    other.states[1, 7:] = 50 * torch.randn(5, 9)
    assert loss(other, exact) == before > 0
    assert loss(exact, exact) == 0
    if positions == 100:
        p, q = (x.states[valid].double().log_softmax(-1) for x in (exact, other))
        assert before == pytest.approx(float(1 - torch.exp(-(p.exp() * (p - q)).sum(-1).mean())), rel=1e-5)


def test_a_text_of_a_batch_runs_the_methods_of_its_own_length():
    model = build("bert").model.eval()
    near, far = sq.Local(window=1), sq.Local(window=2)
    shorter = ShorterLengths(12, {number: {0: sq.Full(), 5: near} for number in (0, 1)})
    ids = torch.randint(5, 60, (3, 20), generator=torch.Generator().manual_seed(0))
    lengths = (4, 12, 20)
    attention_mask = (torch.arange(20)[None] < torch.tensor(lengths)[:, None]).long()
    with torch.inference_mode():
        sq.hf.swap(model, shorter.with_longer(model, {0: far, 1: far}))
        together = model(ids, attention_mask=attention_mask).last_hidden_state
        sq.hf.restore(model)
        for i, (length, method) in enumerate(zip(lengths, (sq.Full(), near, far), strict=True)):
            sq.hf.swap(model, method)
            alone = model(ids[i : i + 1, :length]).last_hidden_state[0]
            sq.hf.restore(model)
            torch.testing.assert_close(together[i, :length], alone, rtol=1e-4, atol=1e-5)


def test_lengths_from_the_text_are_an_option():
    settings = from_arguments(PlanSettings, {"lengths": FROM_TEXT, "batch": 8}, {})
    assert settings.is_from_text
    assert settings.model_lengths == settings.named_lengths == ()
    check_settings(settings)
    assert as_command("plan", settings) == "subquad plan --lengths from-text --batch 8"
    exact = PlanSettings(min_fidelity=0.9999995, shift=1e-7, minutes=3.0)
    assert as_command("plan", exact) == "subquad plan --min-fidelity 0.9999995 --shift 1e-07 --minutes 3"
    assert not PlanSettings().is_from_text
    with pytest.raises(InputError, match="--batch 0 must be at least 1"):
        PlanSettings(batch=0)
    with pytest.raises(InputError, match=r"length 'from-texts' is not a whole number; .*, or from-text$"):
        from_arguments(PlanSettings, {"lengths": "from-texts"}, {})


def test_a_plan_and_its_report_describe_the_batches():
    entry = {"fidelity": 0.995, "bound": 0.993, "confidence": 0.95, "speedup": 1.3}
    plan = Plan({}, (256, 512), {}, {"256": entry, "512": entry | {"batches": SIZES}})
    assert plan.description(512) == f"{plan.description(256)} (batches of 8, mean 284 tokens, padded to 491)"
    verified = Verification(predicted=0.005, loss=0.005, bound=0.007, speedup=1.3, passages=8)
    length = PlannedLength(512, {}, [], [], passages=4, tried=9, batches=BatchSizes(**SIZES), verified=verified)
    assert tried(replace(sample_plan.plan(), lengths=[length])) == [
        "512 tokens (batches of 8, mean 284 tokens, padded to 491): 9 candidates were tried on 4 batches, and the plan "
        "was verified on 8 held-out batches."
    ]
