"""Models whose tokens are split over ranks, on one rank: the trial, the refusals, and how batches are cut."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from accelerate import ParallelismConfig
from accelerate.big_modeling import _attach_context_parallel_hooks
from accelerate.state import AcceleratorState
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import subquad as sq
from subquad.hf.passes import PassMetadata, check_metadata
from subquad.hf.probe import find_layers
from subquad.hf.split_trial import fit_of
from tests.library.distributed.models import bert, gpt2, llama, modernbert, opt, roberta, text
from tests.library.hf.models import TEXT, need_the_interface
from tests.library.hf.survey.zoo import small_model


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def split(alone: None) -> hf.PreTrainedModel:
    model = llama()
    sq.hf.swap(model, "linear", parallel=dist.group.WORLD)
    return model


@pytest.mark.parametrize(
    ("make", "positions", "loss"),
    [
        (bert, "places", "mean"),
        (roberta, "ids", "mean"),
        (modernbert, "places", "plain"),
        (gpt2, "places", "shifted"),
        (opt, "mask", "shifted"),
    ],
)
def test_the_trial_finds_positions_and_loss(make: Callable[[], hf.PreTrainedModel], positions: str, loss: str):
    model = make()
    need_the_interface(model)
    fit = fit_of(model, find_layers(model))
    assert (fit.positions, fit.loss) == (positions, loss)


def test_a_model_is_tried_once_for_as_long_as_its_config_is_the_same(alone: None):
    model, runs = bert(), []
    find_layers(model)
    model.register_forward_pre_hook(lambda *given: runs.append(1))
    sq.hf.swap(model, "linear", parallel=sq.distributed.Ranks())
    tried = len(runs)
    assert tried > 0
    sq.hf.swap(model, "performer", parallel=sq.distributed.Ranks())
    assert len(runs) == tried
    sq.hf.restore(model)
    model.config.layer_norm_eps *= 2
    sq.hf.swap(model, "linear", parallel=sq.distributed.Ranks())
    assert len(runs) > tried


def classifier() -> hf.PreTrainedModel:
    return hf.BertForSequenceClassification(hf.BertConfig(**TEXT))


def dropping_layers() -> hf.PreTrainedModel:
    model = opt()
    model.config.layerdrop = 0.1
    return model


def by_length() -> hf.PreTrainedModel:
    """A model that counts positions from its own input whatever it is given."""

    class Embeddings(hf.models.bert.modeling_bert.BertEmbeddings):
        def forward(self, *args: Any, position_ids: Any = None, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    model = hf.BertModel(hf.BertConfig(**TEXT))
    model.embeddings.__class__ = Embeddings
    return model


def mixing() -> hf.PreTrainedModel:
    """A model that mixes neighbouring tokens outside of attention."""

    class Shifting(nn.Linear):
        def forward(self, x: Any) -> Any:
            return super().forward(x + x.roll(1, 1))

    model = hf.BertModel(hf.BertConfig(**TEXT))
    model.encoder.layer[1].intermediate.dense.__class__ = Shifting
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (dropping_layers, "leaves layers out at random"),
        (classifier, "its output 'logits' is not one for each token"),
        (by_length, "layer 0 .* has other queries on a part of the tokens than on all of them"),
        (mixing, "its output 'last_hidden_state' is another one on a part of the tokens"),
        (lambda: hf.T5EncoderModel(hf.T5Config(vocab_size=60, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4)),
         "a position bias"),
        (lambda: hf.BartModel(hf.BartConfig(vocab_size=60, d_model=32, encoder_layers=1, decoder_layers=1,
                                            encoder_attention_heads=4, decoder_attention_heads=4)),
         "cross-attention"),
        (lambda: hf.ViTModel(hf.ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4,
                                          intermediate_size=48, image_size=32, patch_size=8)),
         "reads 'pixel_values', but only models of text alone"),
    ],
)  # fmt: skip
def test_models_that_are_not_right_on_a_part_are_refused(alone: None, make: Any, message: str):
    model = make()
    need_the_interface(model)
    with pytest.raises(ValueError, match=message):
        sq.hf.swap(model, "full", parallel=dist.group.WORLD)
    assert sq.hf.bounds(model) == {}


def test_what_parallel_may_be(alone: None, split: hf.PreTrainedModel):
    model = llama()
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "sp"))
    refused: list[tuple[Any, type, str]] = [
        (3, TypeError, "`parallel` is a int, but it must be a dimension of a DeviceMesh"),
        (mesh, ValueError, "the mesh has 2 dimensions, but tokens are split over one"),
        (sq.distributed.Sequence([4], keys=[5]), ValueError, "the sequence has `keys`"),
    ]
    for given, kind, message in refused:
        with pytest.raises(kind, match=message):
            sq.hf.swap(model, "linear", parallel=given)
    with pytest.raises(ValueError, match="`parallel` is not supported with keep='first'"):
        sq.hf.swap(model, "linear", parallel=mesh["sp"], keep="first")
    with pytest.raises(ValueError, match=r"a Holder reads the outputs of all tokens.*sq\.hf\.transformers_model"):
        sq.hf.swap(Holder(model), "linear", parallel=mesh["sp"])
    batch = text("right")
    want = split(**batch).logits
    model.load_state_dict(split.state_dict())
    for given in (mesh["sp"], sq.distributed.Ranks(), sq.distributed.Sequence.even(23)):
        sq.hf.swap(model, "linear", parallel=given)
        torch.testing.assert_close(model(**sq.hf.shard(model, batch)).logits, want)
    with pytest.raises(ValueError, match=r"the ranks have \(5,\) tokens, but the model was swapped for \(23,\)"):
        model(batch["input_ids"][:, :5])
    sq.hf.restore(model)
    assert not model._forward_pre_hooks
    assert not model.model._forward_pre_hooks


class Holder(nn.Module):
    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model


def test_inputs_that_cannot_be_split_are_refused(split: hf.PreTrainedModel):
    batch = text("right")
    ids, mask = batch["input_ids"], batch["attention_mask"]
    refused: list[tuple[dict[str, Any], str]] = [
        ({"use_cache": True}, "a cache .* is not supported with `parallel`"),
        ({"past_key_values": hf.DynamicCache()}, "a cache .* is not supported with `parallel`"),
        ({"logits_to_keep": 1}, "'logits_to_keep' is not supported with `parallel`"),
        ({"attention_mask": mask[:, 1:]}, r"'attention_mask' is \(2, 22\), but this rank's tokens are \(2, 23\)"),
        ({"return_dict": False}, "leave out return_dict=False"),
    ]
    for change, message in refused:
        with pytest.raises(ValueError, match=message):
            split(**batch | change)
    with pytest.raises(ValueError, match=r"a cache .* is not supported with `parallel`"):
        split.generate(ids, attention_mask=mask, max_new_tokens=2)
    with pytest.raises(ValueError, match="runs outside of its model's forward pass"):
        split.model.layers[0](torch.zeros(1, 3, 32), position_embeddings=split.model.rotary_emb(
            torch.zeros(1, 3, 32), torch.arange(3)[None]))  # fmt: skip
    with sq.hf.keeping(split, mask.bool()):  # bools are this rank's tokens
        assert split(**batch).past_key_values is None


def test_attention_that_drops_is_refused(alone: None):
    model = hf.BertModel(hf.BertConfig(**TEXT, attention_probs_dropout_prob=0.1))
    sq.hf.swap(model, "linear", parallel=dist.group.WORLD)
    with pytest.raises(ValueError, match=r"drops attention weights at a rate of 0\.1.*attention_probs_dropout_prob"):
        model.train()(**text("right"))
    assert "pooler_output" not in model.eval()(**text("right"))


def test_batches_are_cut_with_their_labels_shifted(split: hf.PreTrainedModel):
    batch = text("right")
    part = sq.hf.shard(split, batch | {"labels": batch["input_ids"], "use_cache": None})
    assert part["shift_labels"][:, :-1].equal(batch["input_ids"][:, 1:])
    assert bool((part["shift_labels"][:, -1] == -100).all())
    assert "use_cache" not in part
    with pytest.raises(ValueError, match=r"'labels', \(2,\), cannot be cut"):
        sq.hf.shard(split, batch | {"labels": torch.tensor([0, 1])})
    with pytest.raises(ValueError, match=r"'images', \(2, 23\), cannot be cut"):
        sq.hf.shard(split, batch | {"images": torch.zeros(2, 23)})
    with pytest.raises(ValueError, match="was not swapped with `parallel`"):
        sq.hf.shard(llama(), batch)


def test_labels_of_a_loss_that_has_no_shares_are_refused():
    metadata = PassMetadata(tokens=4, items=2, mask=0, positions=0, first=0, labels=3, shifted=1)
    check_metadata([metadata, metadata], "plain", True)
    with pytest.raises(ValueError, match="leave `labels` out, and compute it from the logits"):
        check_metadata([metadata, metadata], None, True)


def test_a_split_model_is_copied_and_saved_and_not_pickled(split: hf.PreTrainedModel, tmp_path: Path):
    batch = text("right")
    split.save_pretrained(tmp_path)
    loaded = hf.LlamaForCausalLM.from_pretrained(tmp_path)
    assert str(sq.hf.bounds(loaded)[0].method) == "linear"
    valid = batch["attention_mask"].bool()  # elsewhere one process computes more
    torch.testing.assert_close(loaded(**batch).logits[valid], split(**batch).logits[valid])
    torch.testing.assert_close(copy.deepcopy(split)(**batch).logits, split(**batch).logits)
    with pytest.raises(TypeError, match=r"a process group cannot be pickled; call sq\.hf\.restore"):
        copy.copy(split._subquad_split.ranks).__reduce__()


def test_sequence_parallelism_of_accelerate_is_refused(monkeypatch: pytest.MonkeyPatch, alone: None):
    model = llama()
    sq.hf.swap(model, "linear")
    for size in ("cp_size", "sp_size"):
        monkeypatch.setitem(AcceleratorState._shared_state, "parallelism_config", ParallelismConfig(**{size: 2}))
        with pytest.raises(ValueError, match=rf"accelerate's ParallelismConfig\({size}=2\) splits tokens for its own"):
            model(**text("right"))


def test_what_accelerate_and_trainer_say_themselves(split: hf.PreTrainedModel):
    """Their messages, which users of these libraries meet before ours."""
    config = SimpleNamespace(cp_enabled=True, cp_backend="torch")
    trainer = SimpleNamespace(accelerator=SimpleNamespace(parallelism_config=config))
    with pytest.raises(ValueError, match="Context parallelism is supported only with SDPA attention, you are using su"):
        hf.Trainer._prepare_context_parallel_inputs(trainer, split, text("right"))
    hooked = copy.deepcopy(split)
    _attach_context_parallel_hooks(hooked)
    with pytest.raises(ValueError, match="was given no attention mask, not even the empty one"):
        hooked(**text("right"))


def test_a_model_that_makes_masks_over_queries_and_keys_is_refused(alone: None):
    model = small_model("kosmos_2_text_model")
    with pytest.raises(ValueError, match="cannot run on tokens that are split over ranks"):
        sq.hf.swap(model, "linear", parallel=dist.group.WORLD)


def test_use_does_not_reach_into_hugging_face_models(alone: None):
    model = llama()
    sq.hf.swap(model, "linear")
    of = sq.distributed.Sequence.even(23)
    with sq.distributed.use(of), pytest.raises(ValueError, match=r"sq\.hf\.swap\(model, method, parallel=group\)"):
        model(**text("right"))
