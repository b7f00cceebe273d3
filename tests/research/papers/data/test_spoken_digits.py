from pathlib import Path

import numpy as np
import pytest

from subquad.core.errors import InputError
from subquad.research.papers.data.filter_banks import FLOOR, filter_banks, normalised, silence, triangles
from subquad.research.papers.data.spoken_digits import ARCHIVE, read_spoken_digits
from subquad.research.papers.data.tones import archive, wav


def test_recordings_are_read_in_order_with_what_their_names_say(tmp_path: Path) -> None:
    archive(tmp_path, {"recordings/7_theo_12.wav": wav(800), "recordings/0_Anna_3.wav": wav(1600), "LICENSE": b"free"})
    first, second = read_spoken_digits(tmp_path)
    assert (first.digit, first.speaker, first.take) == (0, "anna", 3)
    assert (second.digit, second.speaker, second.take) == (7, "theo", 12)
    assert first.features.shape == (18, 40)  # (1600 − 200) / 80 + 1
    assert first.features.dtype == np.float32


def test_recordings_are_read_once(tmp_path: Path) -> None:
    archive(tmp_path, {"1_a_0.wav": wav(800)})
    assert read_spoken_digits(tmp_path) is read_spoken_digits(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("seven_theo_0.wav", wav(800), "'seven_theo_0.wav' is not named"),
        ("7_theo.wav", wav(800), "'7_theo.wav' is not named"),
        ("7_theo_0.wav", wav(800, rate=16000), "16000 samples per second, but 1 channel, 16 bits and 8000 are read"),
        ("7_theo_0.wav", wav(800, channels=2), "has 2 channels"),
        ("7_theo_0.wav", b"no sound", "'7_theo_0.wav' is no .wav file"),
        ("7_theo_0.wav", wav(800)[:20], "'7_theo_0.wav' is no .wav file"),
        ("7_theo_0.wav", wav(0), "'7_theo_0.wav' contains no samples"),
        ("readme.txt", b"text", "contains no .wav file"),
    ],
)
def test_a_malformed_file_is_named(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    archive(tmp_path, {name: content})
    with pytest.raises(InputError, match=said):
        read_spoken_digits(tmp_path)


def test_a_missing_archive_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no recordings at .*recordings\.zip"):
        read_spoken_digits(tmp_path)


def test_an_archive_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / ARCHIVE).parent.mkdir()
    (tmp_path / ARCHIVE).write_bytes(b"not a zip")
    with pytest.raises(InputError, match="not a whole one"):
        read_spoken_digits(tmp_path)


def test_a_damaged_archive_is_named(tmp_path: Path) -> None:
    archive(tmp_path, {"1_a_0.wav": wav(4000)})
    path = tmp_path / ARCHIVE
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255
    path.write_bytes(content)
    with pytest.raises(InputError, match="not a whole one"):
        read_spoken_digits(tmp_path)


@pytest.mark.parametrize("hertz", [250.0, 1000.0, 3000.0])
def test_a_tone_is_loudest_in_the_band_around_it(hertz: float) -> None:
    features = filter_banks(np.sin(2 * np.pi * hertz * np.arange(8000) / 8000), 8000)
    middles = 700 * (10 ** (np.linspace(0, 2595 * np.log10(1 + 4000 / 700), 42)[1:-1] / 2595) - 1)
    assert (features.argmax(1) == np.abs(middles - hertz).argmin()).all()


def test_filter_banks_are_the_formula() -> None:
    samples = np.random.default_rng(0).normal(size=700) / 10
    frame = samples[160:360] * (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(200) / 199))
    waves = np.exp(-2j * np.pi * np.outer(np.arange(257), np.arange(200)) / 512)
    power = np.abs(waves @ frame) ** 2
    expected = np.log(triangles(40, 512, 8000) @ power)
    np.testing.assert_allclose(filter_banks(samples, 8000)[2], expected, rtol=1e-5)


def test_triangles_meet_their_neighbours() -> None:
    rows = triangles(40, 4096, 8000)
    inner = rows.sum(0)[(rows.argmax(1)[0] <= np.arange(2049)) & (np.arange(2049) <= rows.argmax(1)[-1])]
    np.testing.assert_allclose(inner, 1.0, atol=0.05)  # the sampled maxima stand beside the corners
    assert (triangles(40, 512, 8000).sum(1) > 0).all()


def test_silence_is_what_no_sound_gives() -> None:
    np.testing.assert_array_equal(filter_banks(np.zeros(360), 8000), silence(3))
    assert silence(1)[0, 0] == np.float32(np.log(FLOOR))


def test_a_recording_shorter_than_a_window_is_one_frame() -> None:
    assert filter_banks(np.ones(50), 8000).shape == (1, 40)


def test_normalised_bands_have_mean_0_and_variance_1_and_an_even_one_is_0() -> None:
    features = np.random.default_rng(0).normal(3.0, 5.0, (50, 40)).astype(np.float32)
    features[:, 7] = -2.0
    found = normalised(features)
    np.testing.assert_allclose(found.mean(0), 0.0, atol=1e-5)
    np.testing.assert_allclose(np.delete(found, 7, 1).std(0), 1.0, rtol=1e-4)
    assert not found[:, 7].any()
