"""The next byte and the next base: windows, n-grams, the user's own files, figures, missing data."""

import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

from subquad.core.errors import InputError
from subquad.research.training.run import train
from subquad.research.training.settings import settings_of
from subquad.research.training.tasks.lm import Lm, words_ended
from subquad.research.training.tasks.ngrams import ngram_bits
from subquad.research.training.tasks.windows import DrawnWindows, Windows, with_start

REAL = os.environ.get("SUBQUAD_DATA")
START = 256
TINY = {
    "model": {"layers": 1, "heads": 2, "width": 16, "feed_forward": 32},
    "training": {"steps": 3, "batch": 2, "warmup": 0, "every": 0},
}


def sequences(*lengths):
    return [with_start(np.arange(n) % 251, START) for n in lengths]


def perfect(batch, chance=0.5):
    """Logits that give each next symbol this chance."""
    ids = batch["input_ids"]
    logits = torch.full((*ids.shape, 260), math.log((1 - chance) / 259))
    logits[:, :-1].scatter_(2, ids[:, 1:, None], math.log(chance))
    return CausalLMOutputWithPast(logits=logits)


# ---------------------------------------------------------------------- windows


@pytest.mark.parametrize("length", [2, 3, 7, 50, 500])
def test_every_symbol_is_said_once(length):
    parts = sequences(100, 1, 7, 49)
    windows = Windows(parts, length)
    said = [windows[i]["symbols"] for i in range(len(windows))]
    assert all(1 < len(window) <= length for window in said)
    assert np.array_equal(np.concatenate([w[1:] for w in said]), np.concatenate([p[1:] for p in parts]))
    before = np.concatenate([w[:-1] for w in said])
    assert np.array_equal(before, np.concatenate([p[:-1] for p in parts]))
    with pytest.raises(IndexError):
        windows[len(windows)]


def test_windows_are_drawn_evenly_and_the_same_each_time():
    parts = [with_start(np.zeros(40, dtype=np.uint8), START), with_start(np.ones(5, dtype=np.uint8), START)]
    drawn = DrawnWindows(parts, 10, 2000, seed=3)
    found = [drawn[i]["symbols"] for i in range(2000)]
    assert all(np.array_equal(found[i], drawn[i]["symbols"]) for i in range(0, 2000, 97))
    short = sum(len(window) == 6 for window in found)
    assert {len(window) for window in found} == {6, 10}
    assert 2000 / 33 * 0.6 < short < 2000 / 33 * 1.5  # 32 places in one, 1 in the other
    starts = sum(window[0] == START and len(window) == 10 for window in found)
    assert 2000 / 33 * 0.6 < starts < 2000 / 33 * 1.5
    assert any(not np.array_equal(DrawnWindows(parts, 10, 9, 4)[i]["symbols"], found[i]) for i in range(9))


def test_a_batch_is_padded_and_says_no_start_and_no_padding():
    task = Lm(length=8)
    windows = Windows(sequences(10), 8)
    batch = task.collate([windows[0], windows[1]])
    assert batch["attention_mask"].sum(1).tolist() == [8, 4]
    assert (batch["labels"] != -100).sum(1).tolist() == [7, 4]  # the start of the text is no byte
    assert "attention_mask" not in task.collate([windows[0]])


# ---------------------------------------------------------------------- figures and baselines


def test_bits_per_byte_and_per_word_by_hand(tmp_path):
    folder = tmp_path / "wikitext-tiny"
    folder.mkdir()
    (folder / "valid.txt").write_text("one two three \n" * 20)
    (folder / "test.txt").write_text(" a bc  d \n \nef\n")  # 4 words and 3 ends of lines, in 15 bytes
    task = Lm(corpus="wikitext-tiny", length=4)
    windows = task.splits(tmp_path).test
    batches = [task.collate([windows[i]]) for i in range(len(windows))]
    scores = torch.cat([task.score(perfect(batch), batch) for batch in batches])
    assert scores.sum(0)[1:].tolist() == [15, 7]
    figures = task.metrics(scores)
    assert figures["bits_per_byte"] == pytest.approx(1.0, rel=1e-5)
    assert figures["byte_perplexity"] == pytest.approx(2.0, rel=1e-5)
    assert figures["word_perplexity"] == pytest.approx(2 ** (15 / 7), rel=1e-4)
    uniform = task.baselines(task.splits(tmp_path))["uniform"]
    assert uniform["word_perplexity"] == pytest.approx(2 ** (8 * 15 / 7))


def test_ngrams_by_hand():
    train = [np.array([9, 0, 1, 0, 1, 0], dtype=np.int16)]
    test = [np.array([9, 0, 1, 2], dtype=np.int16)]
    unigram = [(count + 2 / 3) / (5 + 2) for count in (3, 2, 0)]
    # After the start came one 0; after 0 came two 1s, one kind; after 1 two 0s, never a 2.
    bigram = [(1 + unigram[0]) / 2, (2 + unigram[1]) / 3, unigram[2] / 3]
    want = [-sum(map(math.log2, chances)) / 3 for chances in (unigram, bigram)]
    assert ngram_bits(train, test, predicted=3, order=1) == pytest.approx(want)


def test_ngrams_are_distributions():
    train = [np.array([4, 0, 1, 1, 2, 0, 1, 2, 0], dtype=np.int16)]
    for order in (0, 1, 3):
        tests = [np.array([4, 0, 1, x], dtype=np.int16) for x in range(3)]
        whole = [2 ** (-3 * ngram_bits(train, [test], 3, order)[-1]) for test in tests]
        before = 2 ** (-2 * ngram_bits(train, [tests[0][:3]], 3, order)[-1])
        assert sum(whole) == pytest.approx(before)


def test_a_compressor_that_has_seen_the_text_needs_next_to_nothing(tmp_path):
    letters = np.random.default_rng(0).integers(97, 123, 3000).astype(np.uint8).tobytes()
    (tmp_path / "a.txt").write_bytes(letters)
    (tmp_path / "b.txt").write_bytes(letters[::-1])
    files = {"files": str(tmp_path / "a.txt"), "validation_files": str(tmp_path / "b.txt")}
    for test, low, high in (("a.txt", 0.0, 0.2), ("b.txt", 4.5, 5.5)):
        task = Lm(**files, test_files=str(tmp_path / test))
        figures = task.baselines(task.splits())["lzma, after the training text"]
        assert low < figures["bits_per_byte"] < high


# ---------------------------------------------------------------------- the user's own files, missing data


def test_the_last_tenth_of_a_single_file_is_held_out(tmp_path):
    path = tmp_path / "my.txt"
    path.write_text("".join(f"line {i}\n" for i in range(200)))
    splits = Lm(files=(str(path),)).splits()
    texts = [
        part.sequences[0][1:].astype(np.uint8).tobytes() for part in (splits.train, splits.validation, splits.test)
    ]
    assert b"".join(texts) == path.read_bytes()
    assert [round(20 * len(text) / path.stat().st_size) for text in texts] == [18, 1, 1]
    own = Lm(files=str(path), test_files=str(path)).splits()
    assert sum(len(s) - 1 for s in own.test.sequences) == path.stat().st_size


def test_my_own_short_file_is_learned_from(tmp_path):
    path = tmp_path / "my.txt"
    path.write_text("all work and no play makes a dull text\n" * 6)
    settings = settings_of("lm", {"task": {"files": [str(path)], "length": 16}}, TINY)
    outcome = train(settings, tmp_path / "run")
    assert set(outcome.test) == {"loss", "bits_per_byte", "byte_perplexity"}
    assert outcome.test["bits_per_byte"] == pytest.approx(math.log2(outcome.test["byte_perplexity"]))
    assert 6 < outcome.test["bits_per_byte"] < 9
    assert outcome.model.generate(torch.tensor([list(b"all")]), max_new_tokens=4).shape == (1, 7)


def test_texts_go_in_and_come_out_as_they_are_learned_from(tmp_path):
    path = tmp_path / "my.txt"
    path.write_text("all work and no play makes a dull text\n" * 6)
    task = Lm(files=str(path), length=16)
    batch = task.encode(["é", "dull"])
    assert batch["input_ids"].tolist() == [[257, 257, 256, 0xC3, 0xA9], [256, *b"dull"]]
    assert task.decode(batch["input_ids"]) == ["é", "dull"]
    assert task.splits().train.sequences[0][:5].tolist() == task.encode(["all "])["input_ids"][0].tolist()
    model = task.model(settings_of("lm", TINY).model).eval()
    together = model.generate(**batch, max_new_tokens=4, do_sample=False)
    alone = model.generate(**task.encode(["é"]), max_new_tokens=4, do_sample=False)
    assert together[0, 2:].tolist() == alone[0].tolist()
    with pytest.raises(TypeError, match=r"write encode\(\[text\]\)"):
        task.encode("dull")


def test_limits_cut_what_is_measured(tmp_path):
    path = tmp_path / "my.txt"
    path.write_text("abcdefghij" * 100)
    splits = Lm(files=str(path), limit=20, length=8).splits()
    assert [sum(len(s) - 1 for s in part.sequences) for part in (splits.validation, splits.test)] == [20, 20]
    assert len(splits.train.sequences[0]) == 901


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, r"'lm' needs text: --set task.files=my.txt, or a corpus with --data-dir FOLDER"),
        ({"files": ["none.txt"]}, "no file or folder at none.txt"),
    ],
)
def test_missing_text_is_said(settings, message):
    with pytest.raises(InputError, match=message):
        settings_of("lm", {"task": settings}).task.splits(None)


def test_a_missing_corpus_is_named(tmp_path):
    with pytest.raises(InputError, match=r"needs the corpus 'ptb', but there is no folder .*ptb"):
        Lm(corpus="ptb").splits(tmp_path)


@pytest.mark.parametrize(
    ("task", "settings", "message"),
    [
        ("lm", {"length": 1}, "length=1, but it must be at least 2"),
        ("lm", {"held_out": 1.0}, "held_out=1.0, but it must be"),
        ("lm", {"test_files": ["a.txt"]}, "go with files"),
    ],
)
def test_settings_are_checked(task, settings, message):
    with pytest.raises(InputError, match=message):
        settings_of(task, {"task": settings})


@pytest.mark.data
def test_the_words_of_wikitext_are_those_of_its_authors():
    sequence = Lm().splits(Path(REAL)).test.sequences[0]
    ids = torch.from_numpy(sequence.astype(np.int64))[None]
    assert words_ended(ids, ids) == 245_569
