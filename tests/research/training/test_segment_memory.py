"""Language models that read pieces with a memory: equality with one long pass, gradients, padding, training."""

import pytest
import torch
from huggingface_hub.errors import StrictDataclassClassValidationError

import subquad as sq
from subquad.core.errors import InputError
from subquad.research.training.models import CausalLanguageModel, Memory
from subquad.research.training.run import train
from subquad.research.training.settings import settings_of
from subquad.research.training.tasks.lm import Lm
from tests.research.training.test_language import build, text

RELATIVE = "full:positions=relative"
PLACED = [
    *((RELATIVE, positions) for positions in ("none", "learned")),
    *(("full", positions) for positions in ("sinusoidal", "layer-sinusoidal", "rotary")),
    ("local:window=4,positions=relative", "none"),
    ("linear", "rotary"),
    (["full", "local:window=6"], "rotary"),
]


def remembering(method=RELATIVE, positions="none", *, piece=7, memory=20, **more) -> CausalLanguageModel:
    model = build(method, positions, piece=piece, memory=memory, **more)
    for name, parameter in model.named_parameters():
        if "learned" in name and "positions" not in positions:
            parameter.data.mul_(5.0)
    return model


def at_once(model: CausalLanguageModel, ids: torch.Tensor, **more) -> torch.Tensor:
    """The logits of one long pass of the same model."""
    piece, model.config.piece = model.config.piece, 0
    try:
        return model(ids, **more).logits
    finally:
        model.config.piece = piece


@pytest.mark.parametrize(("method", "positions"), PLACED)
def test_where_the_memory_covers_all_it_is_one_long_pass(method, positions):
    model, ids = remembering(method, positions), text()
    torch.testing.assert_close(model(ids).logits, at_once(model, ids), atol=1e-4, rtol=1e-4)


def test_with_the_models_own_attention_too():
    model, ids = remembering("full", "rotary"), text()
    wanted = model(ids).logits
    sq.hf.restore(model)
    torch.testing.assert_close(model(ids).logits, wanted, atol=1e-4, rtol=1e-4)


def test_a_short_memory_is_seen_and_nothing_before_it():
    model, ids = remembering(memory=4, num_hidden_layers=1), text()
    torch.testing.assert_close(model(ids).logits[:, 14:], at_once(model, ids[:, 10:])[:, 4:], atol=1e-4, rtol=1e-4)
    without = remembering(memory=0)
    torch.testing.assert_close(without(ids).logits[:, 14:], at_once(without, ids[:, 14:]), atol=1e-4, rtol=1e-4)


def test_layers_reach_further_than_the_memory():
    def reach(layers: int) -> int:
        model, ids = remembering(piece=4, memory=4, num_hidden_layers=layers), text(1)
        other = ids.clone()
        other[:, 0] += 1
        changed = (model(ids).logits - model(other).logits).abs().amax(-1)[0] > 1e-6
        return int(changed.nonzero().max())

    assert [reach(layers) for layers in (1, 2, 3)] == [7, 11, 15]


def test_the_gradient_stops_at_the_memory():
    model, ids = remembering(memory=20, tie_word_embeddings=False), text(1, 14)
    ids[0, :7], ids[0, 7:] = torch.arange(7), torch.arange(100, 107)
    model(ids, labels=ids.masked_fill(torch.arange(14) < 8, -100)).loss.backward()
    reached = model.embedding.weight.grad.abs().amax(-1) > 0
    assert not reached[:7].any()
    assert reached[100:106].all()
    assert all(p.grad.abs().max() > 0 for name, p in model.named_parameters() if "k_proj.weight" in name)


def test_padding_on_the_right_changes_nothing():
    model, ids = remembering(memory=9), text(3, 20)
    mask = (torch.arange(20) < torch.tensor([[20], [12], [3]])).long()
    out = model(ids, attention_mask=mask).logits
    for row, size in enumerate((20, 12, 3)):
        alone = model(ids[row : row + 1, :size]).logits[0]
        torch.testing.assert_close(out[row, :size], alone, atol=1e-4, rtol=1e-4)


def test_a_memory_is_carried_from_call_to_call():
    model, ids, memory = remembering(memory=6), text(2, 28), Memory(6)
    parts = [model(part, memory=memory).logits for part in ids.split(14, dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), model(ids).logits, atol=1e-4, rtol=1e-4)
    assert memory.count == 28
    assert {state.shape for state in memory.states.values()} == {(2, 6, 32)}


def test_padding_in_a_memory_is_not_seen():
    model, ids, padded, alone = remembering("full", "rotary"), text(2, 12), Memory(20), Memory(20)
    model(ids[:, :7], memory=padded, attention_mask=(torch.arange(7) < torch.tensor([[7], [4]])).long())
    after = model(ids[:, 7:], memory=padded).logits
    model(ids[1:, :4], memory=alone)
    torch.testing.assert_close(after[1:], model(ids[1:, 7:], memory=alone).logits, atol=1e-4, rtol=1e-4)


def test_generation_and_saving(tmp_path):
    model, ids = remembering(piece=4, memory=4), text(1, 9)
    said = model.generate(ids, max_new_tokens=5, do_sample=False)
    for at in range(9, 14):
        assert said[0, at] == model(said[:, :at]).logits[0, -1].argmax()
    model.save_pretrained(tmp_path)
    loaded = CausalLanguageModel.from_pretrained(tmp_path).eval()
    assert (loaded.config.piece, loaded.config.memory) == (4, 4)
    assert torch.equal(loaded(ids).logits, model(ids).logits)


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory": 4}, "memory=4 needs pieces that it comes before: give piece, their length"),
        ({"piece": -1}, "piece=-1, but it must be at least 0"),
        (
            {"piece": 4, "memory": 4, "method": ["full", "lsh:selection=argmax,buckets=3"]},
            "'lsh' supports no memory: its keys are those of the queries",
        ),
    ],
)
def test_configs_that_are_refused(options, message):
    with pytest.raises(StrictDataclassClassValidationError, match=message):
        build(**options)


@pytest.mark.usefixtures("unchecked")
def test_a_memory_of_another_model_or_batch_is_refused():
    model, ids, memory = remembering(), text(), Memory(20)
    model(ids, memory=memory)
    with pytest.raises(ValueError, match="`memory` has 2 items but `input_ids` has 3; they must match"):
        model(text(3), memory=memory)
    with pytest.raises(ValueError, match="`memory` has 32 hidden units but `hidden states` has 16"):
        remembering(hidden_size=16)(ids, memory=memory)
    with pytest.raises(TypeError, match=r"`memory` is torch\.float32 but `hidden states` is torch\.bfloat16"):
        model.bfloat16()(ids, memory=memory)


def test_what_pieces_do_not_go_with():
    model, ids = remembering(), text()
    with pytest.raises(ValueError, match="keeps a memory and no key-value cache: pass use_cache=False"):
        model(ids, use_cache=True)
    left = torch.ones_like(ids)
    left[0, :3] = 0
    with pytest.raises(ValueError, match="the padding is on the left, where it would move the pieces"):
        model(ids, attention_mask=left)
    with pytest.raises(ValueError, match="`position_ids` count them otherwise"):
        model(ids, position_ids=torch.arange(20)[None] % 10)
    with pytest.raises(ValueError, match="this is token 60, but the model has 48 learned positions"):
        remembering("full", "learned")(text(1, 60))


# ---------------------------------------------------------------------- training


def test_it_trains_and_the_memory_helps_to_copy(tmp_path):
    path = tmp_path / "my.txt"
    path.write_text("all work and no play makes a dull text\n" * 40)
    sizes = {"layers": 1, "heads": 2, "width": 16, "method": RELATIVE, "positions": "none"}
    tables = {"task": {"files": [str(path)], "length": 33}, "training": {"steps": 4, "batch": 2, "warmup": 0}}
    settings = settings_of("lm", tables, {"model": {**sizes, "piece": 8, "memory": 8}})
    outcome = train(settings, tmp_path / "run")
    assert (outcome.model.config.piece, outcome.model.config.memory) == (8, 8)
    assert 3 < outcome.test["bits_per_byte"] < 9
    again = settings_of("lm", settings.to_dict())
    assert again == settings


def test_relative_positions_are_those_of_every_method():
    def config(**model):
        return Lm(files="my.txt").model(settings_of("lm", {"model": {"layers": 2, **model}}).model).config

    assert config(positions="relative").method == RELATIVE
    assert config(positions="relative").positions == "none"
    mixed = config(positions="relative", method=["local:window=8", "mixed-heads:methods=local:positions=relative+full"])
    assert mixed.method == ["local:window=8,positions=relative", "mixed-heads:methods=local:positions=relative+full"]
    assert config(method="local").method == "local"


@pytest.mark.parametrize(
    ("task", "model", "message"),
    [
        ("text", {"piece": 8}, "piece=8 is for causal language models: the task lm"),
        (
            "lm",
            {"positions": "relative", "method": "linear"},
            "'linear' has no relative positions; 'full' and 'local' do",
        ),
        ("lm", {"memory": 8}, "memory=8 needs pieces that it comes before"),
        ("lm", {"memory": -8}, "memory=-8, but it must be at least 0"),
        (
            "lm",
            {"memory": 8, "piece": 8, "method": "routing"},
            "'routing' supports no memory: its keys are those of the",
        ),
    ],
)
def test_settings_that_are_refused(task, model, message, tmp_path):
    (tmp_path / "my.txt").write_text("a dull text\n" * 100)
    (tmp_path / "my.csv").write_text("text,label\n" + "dull,a\nbright,b\n" * 40)
    file = {"lm": "my.txt", "text": "my.csv"}[task]
    tables = {"task": {"files": [str(tmp_path / file)]}, "model": model}
    with pytest.raises(InputError, match=message):
        train(settings_of(task, tables), tmp_path / "run")
