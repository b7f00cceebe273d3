import threading

import pytest

import subquad as sq
from subquad.ops import backends as module


def test_the_reference_is_always_there():
    assert sq.backends()["reference"] == "available"


def test_each_backend_is_available_or_says_why_not():
    assert all(len(status) >= len("available") for status in sq.backends().values())
    assert set(sq.backends()) == {"reference", "cpu", "triton"}


def test_the_answer_is_a_copy():
    sq.backends().clear()
    assert sq.backends()


def test_an_unknown_backend_is_refused_by_name():
    with pytest.raises(ValueError, match="no backend 'cuda'; there are reference, cpu, triton"), sq.use_backend("cuda"):
        pass


def test_an_absent_backend_is_refused_with_its_reason(monkeypatch):
    monkeypatch.setitem(module._REFUSALS, "triton", "no GPU in this house")
    with (
        pytest.raises(ValueError, match="'triton' cannot run here: no GPU in this house"),
        sq.use_backend("triton"),
    ):
        pass


def test_the_choice_ends_with_the_block_even_after_an_error():
    with pytest.raises(KeyError), sq.use_backend("reference"):
        raise KeyError
    assert module._forced.get() is None


def test_blocks_nest():
    with sq.use_backend("reference"):
        with sq.use_backend("reference"):
            assert module.chosen_backend() == "reference"
        assert module.chosen_backend() == "reference"


def test_the_choice_is_of_this_thread_only():
    seen = []
    with sq.use_backend("reference"):
        thread = threading.Thread(target=lambda: seen.append(module._forced.get()))
        thread.start()
        thread.join()
        assert module.chosen_backend() == "reference"
    assert seen == [None]


def test_the_fastest_available_is_chosen_unless_one_is_forced(monkeypatch):
    assert module.chosen_backend() == "reference"
    monkeypatch.setitem(module._REFUSALS, "cpu", None)
    assert module.chosen_backend() == "cpu"
    with sq.use_backend("reference"):
        assert module.chosen_backend() == "reference"
