import threading

import pytest
import torch

import subquad as sq
from subquad.kernels import dispatch as module


@pytest.fixture(autouse=True)
def only_the_reference(monkeypatch):
    """Leave only the reference available, so that each test, not this machine, decides what runs."""
    for name in ("cpu", "triton"):
        monkeypatch.setitem(module._BACKENDS, name, lambda: "not in this test")


@pytest.fixture
def cpu(monkeypatch):
    monkeypatch.setitem(module._BACKENDS, "cpu", lambda: None)


@pytest.fixture
def triton(monkeypatch):
    monkeypatch.setitem(module._BACKENDS, "triton", lambda: None)


def test_the_reference_is_always_there():
    assert sq.backends()["reference"] == "available"


@pytest.mark.usefixtures("cpu")
def test_each_backend_is_available_or_says_why_not():
    assert sq.backends() == {"reference": "available", "cpu": "available", "triton": "not in this test"}


def test_the_answer_is_a_copy():
    sq.backends().clear()
    assert sq.backends()


def test_an_unknown_backend_is_refused_by_name():
    with pytest.raises(ValueError, match="no backend 'cuda'; there are reference, triton, cpu"), sq.use_backend("cuda"):
        pass


def test_an_absent_backend_is_refused_with_its_reason(monkeypatch):
    monkeypatch.setitem(module._BACKENDS, "triton", lambda: "no GPU in this house")
    with (
        pytest.raises(ValueError, match="'triton' cannot run here: no GPU in this house"),
        sq.use_backend("triton"),
    ):
        pass


def test_the_choice_ends_with_the_block_even_after_an_error():
    with pytest.raises(KeyError), sq.use_backend("reference"):
        raise KeyError
    assert module._forced.get() is None
    assert not module._open_blocks


@pytest.mark.usefixtures("cpu")
def test_blocks_nest():
    with sq.use_backend("cpu"):
        with sq.use_backend("reference"):
            assert module.chosen_backend() == "reference"
        assert module.chosen_backend() == "cpu"


@pytest.mark.usefixtures("cpu")
def test_blocks_of_one_name_end_from_the_inside():
    with sq.use_backend("reference"), sq.use_backend("cpu"):
        with sq.use_backend("reference"):
            pass
        assert module._open_blocks == ["reference", "cpu"]


@pytest.mark.usefixtures("cpu")
def test_the_choice_is_of_this_thread_only():
    seen = []
    with sq.use_backend("reference"):
        thread = threading.Thread(target=lambda: seen.append(module.chosen_backend()))
        thread.start()
        thread.join()
        assert module.chosen_backend() == "reference"
    assert seen == ["cpu"]


@pytest.mark.usefixtures("cpu")
def test_the_fastest_available_is_chosen_unless_one_is_forced():
    assert module.chosen_backend() == "cpu"
    with sq.use_backend("reference"):
        assert module.chosen_backend() == "reference"


# ---------------------------------------------------------------------- one call


def test_without_compiled_backends_the_reference_takes_every_call():
    assert module.choose() == module.choose(cpu=None, triton=None) == "reference"


@pytest.mark.usefixtures("cpu")
def test_a_call_goes_to_the_fastest_backend_that_takes_it():
    assert module.choose(cpu=None) == module.choose(cpu=None, triton=None) == "cpu"
    assert module.choose(cpu="too long") == "reference"


@pytest.mark.usefixtures("cpu", "triton")
def test_compiled_code_goes_before_the_interpreter():
    """No tensor is on a CPU and on a GPU: both take it only where Triton's interpreter runs."""
    assert module.choose(cpu=None, triton=None) == "cpu"
    assert module.choose(cpu="on a GPU", triton=None) == "triton"
    assert module.choose(cpu=None, triton="on the CPU") == "cpu"
    assert module.choose(cpu="too long", triton="on the CPU") == "reference"


@pytest.mark.usefixtures("triton")
def test_an_op_goes_to_no_backend_that_does_not_have_it():
    assert module.choose(cpu=None) == "reference"
    with (
        pytest.raises(ValueError, match="'triton' cannot run this call: it does not have this op"),
        sq.use_backend("triton"),
    ):
        module.choose(cpu=None)


@pytest.mark.usefixtures("cpu")
def test_a_forced_backend_takes_the_call_or_says_why_not():
    with sq.use_backend("cpu"):
        assert module.choose(cpu=None, triton=None) == "cpu"
        with pytest.raises(ValueError, match=r"^backend 'cpu' cannot run this call: the dtype is float64$"):
            module.choose(cpu="the dtype is float64")


@pytest.mark.usefixtures("cpu")
def test_the_reference_can_always_be_forced():
    with sq.use_backend("reference"):
        assert module.choose(cpu=None) == module.choose(cpu="too long") == "reference"


@pytest.mark.usefixtures("cpu")
def test_a_compiled_function_follows_the_blocks_too():
    def call(x: torch.Tensor) -> torch.Tensor:
        return x + (1 if module.choose(cpu=None if x.shape[0] < 3 else "too long") == "cpu" else 0)

    compiled = torch.compile(call, fullgraph=True, backend="eager", dynamic=False)
    short, long = torch.zeros(2), torch.zeros(3)
    assert compiled(short).sum() == 2
    assert compiled(long).sum() == 0
    with sq.use_backend("reference"):
        assert compiled(short).sum() == 0
        with sq.use_backend("cpu"):
            assert compiled(short).sum() == 2
    assert compiled(short).sum() == 2
