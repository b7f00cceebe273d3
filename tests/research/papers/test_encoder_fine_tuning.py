"""Fine-tuning: the model, the texts, and the head from which it starts."""

import json
import shutil

import pytest
import torch

import subquad as sq
from subquad.core import checksums as seals
from subquad.core.errors import InputError
from subquad.research.papers.encoder_fine_tuning import FineTune, head_of, texts_of
from subquad.research.papers.random_encoder import write_random_encoder
from subquad.research.training.settings import ModelSettings
from subquad.tools.compare.labelled_tasks import Probe
from subquad.tools.models.pretrained import load


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoder")
    write_random_encoder(folder)
    return folder


def test_texts_are_evenly_spaced_and_all_test_texts_stay(folder):
    whole = texts_of("labelled", folder / "data", 0, 0)
    some = texts_of("labelled", folder / "data", 0, 6)
    assert (whole.train, some.train) == (24, 6)
    assert some.texts == whole.texts[:24:4] + whole.texts[24:]
    assert some.labels == whole.labels[:24:4] + whole.labels[24:]


def test_a_task_without_labels_is_refused(tmp_path):
    (tmp_path / "sts.tsv").write_text("a\ta\t5.0\na\tb\t1.0\n")
    with pytest.raises(InputError, match="'sts' has no labels to learn"):
        texts_of("sts", tmp_path, 0, 0)


def test_splits_share_no_text_and_padding_is_marked(folder):
    task = FineTune(encoder=str(folder / "model"), texts="labelled", length=20)
    splits = task.splits(folder / "data")
    assert [len(part) for part in (splits.train, splits.validation, splits.test)] == [21, 3, 8]
    held = [splits.validation[i]["input_ids"] for i in range(3)]
    assert all(splits.train[i]["input_ids"] not in held for i in range(21))
    batch = task.collate([splits.test[0], {"input_ids": [2, 3], "label": 1}])
    assert batch["attention_mask"].sum(1).tolist() == [20, 2]
    assert batch["labels"][1] == 1


def test_the_model_has_the_pretrained_weights_and_one_projection_for_all_layers(folder):
    task = FineTune(encoder=str(folder / "model"), texts="labelled", length=20, classes=3)
    model = task.model(ModelSettings(method="linformer:k=5,sharing=layerwise"))
    learned = [bound.learned for bound in sq.hf.bounds(model).values()]
    assert len(learned) == 2
    assert learned[0] is learned[1]
    assert learned[0].key.shape[-2:] == (5, 20)
    assert model.head.out_features == 3
    pretrained = load(str(folder / "model")).model.state_dict()
    assert all(torch.equal(tensor, model.encoder.state_dict()[name]) for name, tensor in pretrained.items())


def test_the_head_reads_the_mean_of_real_tokens(folder):
    model = FineTune(encoder=str(folder / "model"), length=20).model(ModelSettings(method="full")).eval()
    ids = torch.tensor([[2, 9, 8, 3, 0, 0]])
    real = (ids > 0).long()
    both, short = (model(ids[:, :n], real[:, :n], torch.tensor([1])).logits for n in (6, 4))
    assert both.allclose(short, atol=1e-5)
    hidden = model.encoder(input_ids=ids[:, :4], attention_mask=real[:, :4]).last_hidden_state
    assert short.allclose(model.head(torch.nn.functional.normalize(hidden.mean(1), dim=-1)), atol=1e-5)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("labels", ["ab", "abc"])
def test_a_head_that_starts_as_the_probe_says_what_the_probe_says(folder, tmp_path, labels, pooling):
    encoder = tmp_path / "model"
    shutil.copytree(folder / "model", encoder)
    (encoder / "1_Pooling").mkdir()
    (encoder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": pooling}))
    pretrained, draw = load(str(encoder)), torch.Generator().manual_seed(0)
    assert pretrained.pooling == pooling
    items = [torch.randint(5, 65, (12,), generator=draw).tolist() for _ in range(30)]
    vectors = pretrained.embed_all(items)
    probe = Probe(vectors, [labels[i % len(labels)] for i in range(30)])
    seals.save(tmp_path / "head.pt", head_of(probe))
    task = FineTune(encoder=str(encoder), length=20, classes=len(labels), head=str(tmp_path / "head.pt"))
    model = task.model(ModelSettings(method="full")).eval()
    batch = task.collate([{"input_ids": item, "label": 0} for item in items])
    assert [labels[i] for i in model(**batch).logits.argmax(-1).tolist()] == probe.predict(vectors)
