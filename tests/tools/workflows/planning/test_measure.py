"""Losses of single layers, by whole passes and by passes whose first blocks are skipped."""

import time

import pytest
import torch
import transformers

import subquad as sq
from subquad.tools.measure import prefix, timing
from subquad.tools.measure.prefix import chain, kept, skipping
from subquad.tools.plan import loads, measure
from subquad.tools.plan.loads import input_loads, output_loss, score_loss
from subquad.tools.plan.measure import Candidate, SingleLosses, screen
from tests.library.hf.models import build
from tests.tools.workflows.planning.steady import make_steady
from tests.tools.workflows.tiny import tokenizer


def inputs(count=6, length=20):
    generator = torch.Generator().manual_seed(3)
    return [{"input_ids": torch.randint(5, 60, (1, length), generator=generator)} for _ in range(count)]


def sharp(name):
    model = build(name).model.eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(6.0)
    return model


@pytest.mark.parametrize("name", ["bert", "llama", "modernbert"])
def test_blocks_in_a_chain_are_found_and_can_be_skipped(name):
    model, item = sharp(name), inputs()[0]
    blocks = chain(model, sq.hf.find_layers(model))
    assert blocks is not None
    with torch.no_grad():
        with kept(blocks.blocks) as outputs:
            exact = model(**item)[0]
        ran = []
        handle = blocks.blocks[0].register_forward_hook(lambda *_: ran.append(0))
        inner = next(m for m in blocks.blocks[0].modules() if isinstance(m, torch.nn.Linear))
        deep = inner.register_forward_hook(lambda *_: ran.append(1))
        with skipping(blocks.blocks[:1], outputs):
            assert torch.equal(model(**item)[0], exact)
        assert ran == [0]  # it was called, and computed nothing
        handle.remove()
        deep.remove()
        assert torch.equal(model(**item)[0], exact)


def test_a_forward_of_another_library_is_there_again_after_a_block_was_skipped():
    hooked, plain = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    hooked.forward = other = lambda x: x  # as accelerate does, whose hooks move inputs
    with skipping([hooked, plain], [torch.ones(1), torch.ones(2)]):
        assert [len(each(torch.zeros(2))) for each in (hooked, plain)] == [1, 2]
    assert vars(hooked)["forward"] is other
    assert "forward" not in vars(plain)


def test_layers_of_two_lists_are_no_chain():
    model = build("t5").model
    assert chain(model, sq.hf.find_layers(model)) is None


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_single_losses_are_those_of_whole_passes(name, monkeypatch):
    model, method = sharp(name), sq.Local(window=3)
    load = input_loads(model, inputs(), None)[0]
    losses = SingleLosses(load)
    short = [losses.loss(0, {layer: method}) for layer in (0, 1)]
    with torch.no_grad():
        exact = load.run(load.items[0])
        for layer in (0, 1):
            sq.hf.swap(model, {layer: method})
            wanted = output_loss(load.run(load.items[0]), exact)
            sq.hf.restore(model)
            assert short[layer] == pytest.approx(wanted, rel=1e-4)
            assert wanted > 1e-4
    monkeypatch.setattr(loads, "chain", lambda *_: None)
    assert SingleLosses(load).loss(0, {1: method}) == pytest.approx(short[1], rel=1e-4)


def held(model, how):
    if how == "module":
        return torch.nn.ModuleDict({"inside": model})
    if how == "peft":
        peft = pytest.importorskip("peft")
        return peft.get_peft_model(model, peft.LoraConfig(target_modules=["query"])).eval()
    return transformers.pipeline("feature-extraction", model=model, tokenizer=tokenizer(special=True))


@pytest.mark.parametrize("how", ["module", "peft", "pipeline"])
def test_blocks_are_skipped_in_what_holds_a_model(how):
    model = sharp("bert")
    holder, ran = held(model, how), []
    load = input_loads(holder, inputs(), None)[0]
    for number, block in enumerate(model.encoder.layer):
        block.attention.register_forward_hook(lambda *_, number=number: ran.append(number))
    assert SingleLosses(load).loss(0, {1: sq.Local(window=3)}) > 1e-4
    assert ran == [0, 1, 1, 1]  # a whole pass, the trial of the chain, and the candidate


def test_a_candidate_that_is_not_in_the_middle_layer_has_its_times():
    load = input_loads(sharp("bert"), inputs(), None)[0]
    found = screen(load, [Candidate("first", {0: sq.Local(window=3)})])
    assert found.seconds["0"].keys() == {"full", "first"}
    assert found.seconds["1"].keys() == {"full"}


def test_a_list_of_blocks_that_is_no_chain_is_noticed(monkeypatch):
    """Blocks that add to what the model holds beside the chain: skipping them would lose that."""
    model = sharp("bert")
    load = input_loads(model, inputs(), None)[0]
    used = []
    original = prefix.skipping

    def wrong(blocks, outputs):
        used.append(len(blocks))
        return original(blocks, [torch.zeros_like(o) if isinstance(o, torch.Tensor) else o for o in outputs])

    monkeypatch.setattr(measure, "skipping", wrong)
    methods = {1: sq.Local(window=3)}
    found = SingleLosses(load).loss(0, methods)
    monkeypatch.setattr(loads, "chain", lambda *_: None)
    assert found == pytest.approx(SingleLosses(load).loss(0, methods), rel=1e-5)
    assert used[0] == 1  # the trial
    assert used[1] == 0  # and whole passes from then on


def test_a_slow_candidate_is_called_once_and_its_errors_are_not_measured(monkeypatch):
    load = input_loads(sharp("bert"), inputs(), None)[0]
    calls = []

    class Slow(sq.Local):
        def attend(self, *args, **options):
            calls.append(time.sleep(0.05))
            return super().attend(*args, **options)

    slow = Slow(window=3)
    found = screen(load, [Candidate("slow", {0: slow, 1: slow}), Candidate("other", {1: sq.Local(window=3)})])
    assert len(calls) == 1
    assert found.seconds["0"]["slow"] > 3 * found.seconds["0"]["full"]
    assert "slow" not in found.errors["0"]


def test_screening_gives_errors_and_times_of_every_layer(monkeypatch):
    make_steady(monkeypatch.setattr)
    model = sharp("bert")
    load = input_loads(model, inputs(), None)[0]
    candidates = [
        Candidate("exact-like", {0: sq.Local(window=40), 1: sq.Local(window=40)}),
        Candidate("narrow", {1: sq.Local(window=2)}),
    ]
    found = screen(load, candidates)
    assert found.errors["0"].keys() == {"exact-like"}
    assert found.errors["1"]["exact-like"] < 1e-5 < found.errors["1"]["narrow"]
    assert found.seconds["1"].keys() == {"full", "exact-like", "narrow"}
    assert found.seconds["0"].keys() == {"full", "exact-like"}
    assert measure.pass_times(load).seconds > 0
    assert found.head_spread["1"] >= 1


def test_every_stopwatch_waits_for_the_device(monkeypatch):
    load = input_loads(sharp("bert"), inputs(), None)[0]
    method, waited = sq.Local(window=3), []
    with load.recorded() as calls:
        load.run(load.items[0])
    monkeypatch.setattr(timing, "_wait", waited.append)
    for timed in (
        lambda: measure.pass_times(load),
        lambda: measure.held_out_pass(load, load.held_out[0], {"full": "full", "local": {0: method}}, seed=0),
        lambda: measure.faster_at(calls[0], {"local": method}, [8, 16], 1),
    ):
        waited.clear()
        timed()
        assert set(waited) == {torch.device("cpu")}


# ---------------------------------------------------------------------- losses


def test_the_loss_of_logits_is_their_divergence():
    class Output:
        def __init__(self, logits):
            self.logits = logits

    a, b = torch.randn(2, 5, 7), torch.randn(2, 5, 7)
    wanted = torch.nn.functional.kl_div(b.log_softmax(-1), a.log_softmax(-1), log_target=True, reduction="none")
    assert output_loss(Output(b), Output(a)) == pytest.approx(float(wanted.sum(-1).mean()), rel=1e-5)
    assert output_loss(Output(a), Output(a)) == 0


def test_padding_has_no_part_in_the_mean_state():
    model, item = sharp("bert"), inputs()[0]
    padded = {
        "input_ids": torch.nn.functional.pad(item["input_ids"], (0, 8)),
        "attention_mask": torch.tensor([[1] * 20 + [0] * 8]),
    }
    plain = input_loads(model, [item] * 6, None)[0]
    with_pads = input_loads(model, [padded] * 6, None)[0]
    sq.hf.swap(model, sq.Local(window=2))
    swapped = [load.run(load.items[0]) for load in (plain, with_pads)]
    sq.hf.restore(model)
    exact = [load.run(load.items[0]) for load in (plain, with_pads)]
    losses = [output_loss(a, b) for a, b in zip(swapped, exact, strict=True)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.parametrize("name", ["wav2vec2", "bart", "bart-states", "bert"])
def test_rows_of_padding_do_not_count(name):
    """Of speech, whose mask is of its samples, the frames; of a decoder, the rows of its own mask."""
    case = build(name.removesuffix("-states"))
    model = case.model.eval() if name != "bart-states" else case.model.eval().model
    load = input_loads(model, [case.inputs] * 5, None)[0]
    with torch.inference_mode():
        exact, padded, other = (load.run(load.items[0]) for _ in range(3))
        attribute = "logits" if "logits" in exact.output else "last_hidden_state"
        getattr(padded.output, attribute)[~case.valid] += 1 + torch.arange(exact.output[attribute].shape[-1])
        getattr(other.output, attribute)[case.valid] += 1 + torch.arange(exact.output[attribute].shape[-1])
        assert output_loss(padded, exact) == pytest.approx(0.0, abs=1e-6)
        assert output_loss(other, exact) > 0.01


def test_without_a_mask_of_its_rows_all_of_an_output_counts():
    case = build("bart")
    item = {name: value for name, value in case.inputs.items() if name != "decoder_attention_mask"}
    with torch.inference_mode():
        exact, other = (input_loads(case.model.eval(), [item] * 5, None)[0].run(item) for _ in range(2))
        other.output.logits[-1, -1] += torch.arange(60)
        assert output_loss(other, exact) > 0.01


def test_a_score_of_which_more_is_better():
    assert score_loss(0.5, 0.75) == 0.25


@pytest.mark.parametrize(("given", "message"), [
    ([], "there are no inputs"),
    (inputs(4), "4 inputs have 20 tokens, but a plan needs five of each length"),
    ([*inputs(5), *inputs(2, 9)], "2 inputs have 9 tokens"),
])  # fmt: skip
def test_too_few_inputs_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        input_loads(sharp("bert"), given, None)


def test_inputs_of_another_kind_are_refused():
    with pytest.raises(TypeError, match="an input is a mapping of the model's keywords to tensors, got Tensor"):
        sq.plan(sharp("bert"), [torch.ones(3)])
    with pytest.raises(TypeError, match=r"texts as inputs need a SentenceTransformer.* BertModel has none"):
        sq.plan(sharp("bert"), ["a text"])
    with pytest.raises(ValueError, match="metric and score are both given; give one of them"):
        sq.plan(sharp("bert"), inputs(), metric=lambda a, b: 0.0, score=lambda a, b: 0.0)


def test_held_out_inputs_are_others():
    load = input_loads(sharp("bert"), inputs(12), None)[0]
    assert len(load.items) == 4
    assert len(load.held_out) == 8
    assert not {id(x) for x in load.items} & {id(x) for x in load.held_out}
