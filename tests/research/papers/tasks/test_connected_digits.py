from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub.errors import StrictDataclassClassValidationError

import subquad as sq
from subquad.core.errors import InputError
from subquad.research.papers.data.filter_banks import silence
from subquad.research.papers.data.tones import tones
from subquad.research.papers.tasks.connected_digits import Speech, edit_distance
from subquad.research.training.models.ctc_encoder import CTCEncoder, SpeechConfig, ctc_loss, greedy
from subquad.research.training.settings import ModelSettings, settings_of

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tones(tmp_path_factory.mktemp("digits"))


def model_of(**more: object) -> CTCEncoder:
    torch.manual_seed(0)
    return CTCEncoder(SpeechConfig(**{**SIZES, "hidden_dropout": 0.0, **more})).eval()


@pytest.mark.parametrize(
    "method", ["full", "i-clustered:clusters=4,topk=4", "clustered:clusters=4", "reformer:rounds=2"]
)
@pytest.mark.parametrize("subsample", [1, 3])
def test_neither_amount_nor_content_of_padding_changes_anything(method: str, subsample: int) -> None:
    model = model_of(method=method, subsample=subsample)
    features, labels = torch.randn(2, 40, 40), torch.tensor([[1, 2, 2], [3, -100, -100]])
    mask = (torch.arange(40) < torch.tensor([[40], [25]])).long()
    short = model(features, mask, labels)
    longer = torch.cat([features, torch.full((2, 23, 40), torch.nan)], 1)
    longer[1, 25:] = torch.nan
    mask, labels = torch.nn.functional.pad(mask, (0, 23)), torch.nn.functional.pad(labels, (0, 4), value=-100)
    long = model(longer, mask, labels)
    torch.testing.assert_close(long.loss, short.loss, rtol=1e-5, atol=1e-6)
    assert long.lengths.tolist() == short.lengths.tolist()
    for item, tokens in enumerate(short.lengths):
        torch.testing.assert_close(long.logits[item, :tokens], short.logits[item, :tokens], rtol=1e-4, atol=1e-5)


def test_a_loss_is_the_mean_of_those_of_its_items() -> None:
    model = model_of()
    features, labels = torch.randn(2, 30, 40), torch.tensor([[1, 2, 5], [3, -100, -100]])
    each = [model(features[i : i + 1], labels=labels[i : i + 1]).loss for i in range(2)]
    torch.testing.assert_close(model(features, labels=labels).loss, torch.stack(each).mean())


def test_subsampled_frames_stand_side_by_side() -> None:
    model = model_of(subsample=3)
    features = torch.randn(1, 7, 40)
    tokens, lengths = model._tokens(features, torch.ones(1, 7, dtype=torch.long))
    assert tokens.shape == (1, 3, 120)
    assert lengths.tolist() == [3]
    torch.testing.assert_close(tokens[0, 1], features[0, 3:6].flatten())
    assert model_of(subsample=1)._tokens(features, None)[0].shape == (1, 7, 40)


def test_padding_before_a_frame_is_refused() -> None:
    with pytest.raises(ValueError, match="padding must come last"):
        model_of()(torch.randn(1, 4, 40), torch.tensor([[0, 1, 1, 1]]))


def test_ctc_is_the_sum_over_all_alignments() -> None:
    logits = torch.randn(1, 3, 3)
    p = logits.softmax(-1)[0]
    a, blank = p[:, 1], p[:, 0]
    paths = [
        a[0] * a[1] * a[2],
        a[0] * a[1] * blank[2],
        blank[0] * a[1] * a[2],
        a[0] * blank[1] * blank[2],
        blank[0] * a[1] * blank[2],
        blank[0] * blank[1] * a[2],
    ]
    found = ctc_loss(logits, torch.tensor([3]), torch.tensor([[1, -100]]))
    torch.testing.assert_close(found, -torch.stack(paths).sum().log())


def test_ctc_counts_items_alike_and_labels_within_an_item() -> None:
    logits, lengths = torch.randn(2, 8, 5), torch.tensor([8, 6])
    labels = torch.tensor([[1, 1, 4], [2, -100, -100]])
    likely = logits.log_softmax(-1).transpose(0, 1)
    own = torch.nn.functional.ctc_loss(likely, labels.clamp(min=0), lengths, torch.tensor([3, 1]), reduction="none")
    torch.testing.assert_close(ctc_loss(logits, lengths, labels), (own[0] / 3 + own[1]) / 2)
    nothing = ctc_loss(logits[:1], lengths[:1], torch.tensor([[-100]]))
    torch.testing.assert_close(nothing, -likely[:, 0, 0].sum())


def test_more_symbols_than_tokens_are_refused_rather_than_ignored() -> None:
    labels = torch.tensor([[1, 2, -100], [1, 1, -100]])
    assert ctc_loss(torch.randn(2, 3, 5), torch.tensor([2, 3]), labels).isfinite()
    with pytest.raises(ValueError, match="item 1 has 2 symbols, 1 of them repetitions, but only 2 tokens"):
        ctc_loss(torch.randn(2, 3, 5), torch.tensor([2, 2]), labels)


def test_greedy_joins_repetitions_and_leaves_blanks_and_padding_out() -> None:
    paths = torch.tensor([[1, 1, 0, 1, 2, 2, 0], [0, 0, 3, 3, 0, 4, 4]])
    logits = torch.nn.functional.one_hot(paths, 5).float()
    assert greedy(logits, torch.tensor([7, 4])) == [[1, 1, 2], [3]]


@pytest.mark.parametrize(
    ("said", "target", "edits"),
    [
        ([], [1, 2], 2),
        ([1, 2], [], 2),
        ([1, 2, 3], [1, 2, 3], 0),
        ([1, 9, 3], [1, 2, 3], 1),
        ([1, 3], [1, 2, 3], 1),
        ([1, 2, 2, 3], [1, 2, 3], 1),
        ([2, 3, 4, 5], [1, 2, 3, 4], 2),
        ([ord(c) for c in "kitten"], [ord(c) for c in "sitting"], 3),
    ],
)
def test_edit_distance(said: list[int], target: list[int], edits: int) -> None:
    assert edit_distance(said, target) == edits


def test_splits_share_neither_takes_nor_the_held_out_speaker(data: Path) -> None:
    task = Speech(fewest=2, most=4, validation_examples=6, test_examples=8)
    splits = task.splits(data)

    def pools(split: object) -> list[set[tuple[str, int]]]:
        return [
            {(r.speaker, r.take) for digits in pool.values() for takes in digits for r in takes}
            for pool in split.pools  # type: ignore[attr-defined]
        ]

    (train,), (validation,), (test, held) = pools(splits.train), pools(splits.validation), pools(splits.test)
    assert {take for _, take in train} == {10, 11}
    assert {take for _, take in validation} == {5, 6, 7, 8, 9}
    assert {take for _, take in test} == {0, 1, 2, 3, 4}
    assert {speaker for speaker, _ in train | validation | test} == {"anna", "bert"}
    assert {speaker for speaker, _ in held} == {"george"}
    assert [splits.test[i]["held_out"] for i in range(8)] == [False] * 4 + [True] * 4
    assert not any(splits.validation[i]["held_out"] for i in range(6))


def test_an_utterance_is_that_of_its_number(data: Path) -> None:
    task = Speech(fewest=2, most=4)
    one, same = task.splits(data).train, task.splits(data).train
    np.testing.assert_array_equal(one[7]["features"], same[7]["features"])
    assert any(len(one[i]["features"]) != len(one[7]["features"]) for i in range(5))
    other = Speech(fewest=2, most=4, seed=1).splits(data).train
    assert any(other[i]["labels"].tolist() != one[i]["labels"].tolist() for i in range(5))
    assert {len(one[i]["labels"]) for i in range(40)} == {2, 3, 4}


def test_an_utterance_joins_its_recordings_with_silence_between(data: Path) -> None:
    task = Speech(fewest=3, most=3, fewest_gap=2, most_gap=2)
    utterances = task.splits(data).train
    draw = np.random.default_rng((0, 0, 5))
    chosen = utterances._draw(draw, utterances.pools[0])
    gap = silence(2)
    whole = np.concatenate([gap, *(part for r in chosen for part in (r.features, gap))])
    np.testing.assert_allclose(
        utterances[5]["features"], (whole - whole.mean(0)) / np.maximum(whole.std(0), 1e-3), atol=1e-5
    )
    assert utterances[5]["labels"].tolist() == [r.digit + 1 for r in chosen]


def test_speakers_of_an_utterance(data: Path) -> None:
    def speakers(one_speaker: bool) -> set[int]:
        utterances = Speech(fewest=6, most=6, one_speaker=one_speaker).splits(data).train
        drawn = (utterances._draw(np.random.default_rng(i), utterances.pools[0]) for i in range(8))
        return {len({r.speaker for r in recordings}) for recordings in drawn}

    assert speakers(True) == {1}
    assert 2 in speakers(False)


def test_digits_that_do_not_fit_are_left_out(data: Path) -> None:
    item = Speech(fewest=10, most=10, longest=60).splits(data).train[0]
    assert len(item["features"]) <= 60
    assert 1 <= len(item["labels"]) < 10


def test_missing_speakers_and_data_are_named(data: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"held_out='nobody' is not a speaker next to others in .* anna, bert"):
        Speech(held_out="nobody").splits(data)
    with pytest.raises(InputError, match="no recording of digit 0 by 'anna'"):
        Speech().splits(tones(tmp_path, takes=8))
    with pytest.raises(InputError, match="SUBQUAD_DATA"):
        Speech().splits(None)
    with pytest.raises(InputError, match="fewest=9 is more than most=4"):
        settings_of("speech", {"task": {"fewest": 9, "most": 4}})


def test_figures_are_edits_a_digit_of_each_part() -> None:
    scores = torch.tensor([[1.0, 10.0, 0.0], [3.0, 10.0, 0.0], [5.0, 5.0, 1.0]])
    assert Speech().metrics(scores) == {"digit_error_rate": 0.2, "held_out_digit_error_rate": 1.0}
    assert Speech().metrics(scores[:2]) == {"digit_error_rate": 0.2}


def test_scores_count_edits_of_real_tokens(data: Path) -> None:
    task = Speech(fewest=2, most=4, test_examples=4)
    splits = task.splits(data)
    batch = task.collate([splits.test[i] for i in range(4)])
    model = task.model(ModelSettings(layers=1, heads=2, width=16))
    outputs = model.eval()(**batch)
    wanted = [[label for label in row if label != -100] for row in batch["labels"].tolist()]
    said = greedy(outputs.logits, outputs.lengths)
    expected = [[edit_distance(a, b), len(b), held] for a, b, held in zip(said, wanted, [0, 0, 1, 1], strict=True)]
    assert task.score(outputs, batch).tolist() == expected


def test_baselines_hear_nothing(data: Path) -> None:
    task = Speech(test_examples=20)
    found = task.baselines(task.splits(data), data)
    assert found["nothing"] == {"digit_error_rate": 1.0, "held_out_digit_error_rate": 1.0}
    assert 0.55 < found["random digits of the right number"]["digit_error_rate"] < 0.9


@pytest.mark.parametrize("method", ["full", "i-clustered:clusters=4,topk=4", "performer"])
def test_a_saved_model_comes_back_bit_for_bit(method: str, tmp_path: Path) -> None:
    model = model_of(method=method, subsample=2)
    features, mask = torch.randn(2, 31, 40), (torch.arange(31) < torch.tensor([[31], [20]])).long()
    model.save_pretrained(tmp_path)
    again = CTCEncoder.from_pretrained(tmp_path).eval()
    assert torch.equal(again(features, mask).logits, model(features, mask).logits)


def test_another_attention_can_be_put_in() -> None:
    model, features = model_of(), torch.randn(1, 30, 40)
    before = model(features).logits
    sq.hf.swap(model, "oracle-top:topk=2")
    assert not torch.allclose(model(features).logits, before, atol=1e-4)
    sq.hf.swap(model, "full")
    torch.testing.assert_close(model(features).logits, before)


@pytest.mark.parametrize("wrong", [{"bands": 0}, {"symbols": 1}, {"subsample": 0}])
def test_sizes_that_no_model_has_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(StrictDataclassClassValidationError, match="must be at least"):
        SpeechConfig(**wrong)
