"""Training with different settings, and its end when it cannot go on."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from subquad.core.errors import Ended, InputError
from subquad.research.papers.tasks.masked_copy import MaskedCopy
from subquad.research.training.models import MaskedSymbolEncoder
from subquad.research.training.run import Outcome, train
from subquad.research.training.trainer import Diverged
from tests.research.training.small import assert_same_weights, small, without_times


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return train(small(), tmp_path_factory.mktemp("plain"))


def rates(outcome: Outcome) -> dict[int, float]:
    return {entry["step"]: entry["learning_rate"] for entry in outcome.history if "learning_rate" in entry}


# ---------------------------------------------------------------------- settings


def test_accumulated_passes_give_the_curve_of_one(plain: Outcome, tmp_path: Path):
    parts = train(small("training.accumulate=4"), tmp_path)
    for ours, theirs in zip(without_times(parts.history), without_times(plain.history), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


def test_the_seed_decides(plain: Outcome, tmp_path: Path):
    same = train(small(), tmp_path / "same")
    assert_same_weights(same.model, plain.model)
    other = train(small("training.seed=1", "training.steps=8"), tmp_path / "other")
    assert not torch.equal(other.model.head.weight, plain.model.head.weight)


def test_it_learns_in_bf16_as_in_fp32(plain: Outcome, tmp_path: Path):
    half = train(small("training.precision=bf16"), tmp_path)
    assert next(half.model.parameters()).dtype == torch.float32
    losses = [[entry["loss"] for entry in run.history if "loss" in entry] for run in (half, plain)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
    assert losses[0] != losses[1]


def test_the_log_has_the_mean_span_which_its_price_shortens(plain: Outcome, tmp_path: Path):
    def spans(price: float) -> list[float]:
        method = "model.method=adaptive-span:span=12,ramp=2,start=6"
        outcome = train(small(method, f"training.auxiliary={price}", "training.every=0"), tmp_path / str(price))
        return [entry["mean_span"] for entry in outcome.history if "loss" in entry]

    dear, free = spans(0.9), spans(0.0)
    assert len(dear) == len(free) == 2
    assert 6 > dear[0] > dear[1] > 4
    assert free[1] > dear[1]
    assert not any("mean_span" in entry for entry in plain.history)


def test_schedules(plain: Outcome, tmp_path: Path):
    assert rates(plain) == {10: 0.003, 20: 0.003}
    linear = train(small("training.schedule=linear", "training.warmup=14", "training.every=0"), tmp_path / "linear")
    assert rates(linear) == pytest.approx({10: 0.003 * 9 / 14, 20: 0.003 * 5 / 10})
    halving = train(small("training.schedule=halving", "task.examples=64", "training.every=0"), tmp_path / "halving")
    assert rates(halving) == pytest.approx({10: 0.0015, 20: 0.00075})  # 8 steps a pass
    given = ("training.schedule=plateau", "training.every=2", "training.optimizer=adam", "training.learning_rate=1e-12")
    plateau = train(small(*given), tmp_path / "plateau")
    assert rates(plateau) == pytest.approx({10: 0.5e-12, 20: 1e-12 / 8})  # halved after steps 6, 10, 14, 18 and 22


def test_decay_and_clipping(plain: Outcome, tmp_path: Path):
    def size(*given: str) -> float:
        return float(
            train(small("training.steps=8", *given), tmp_path / str(len(given))).model.head.weight.detach().norm()
        )

    assert size("training.weight_decay=20") < 0.9 * size()
    unclipped = train(small("training.clip=0"), tmp_path / "unclipped")
    norms = [entry["grad_norm"] for entry in unclipped.history if "grad_norm" in entry]
    assert all(math.isfinite(norm) and norm > 0 for norm in norms)
    assert rates(unclipped) == rates(plain)


@pytest.mark.parametrize(("keep", "step"), [("best", 4), ("last", 12)])
def test_the_best_or_the_last_weights_are_kept_and_patience_ends_it(keep: str, step: int, tmp_path: Path):
    given = ("training.every=4", "training.patience=2", "training.learning_rate=1e-12", f"training.keep={keep}")
    outcome = train(small(*given), tmp_path)
    assert (outcome.steps, outcome.best_step) == (12, step)
    kept = next(entry for entry in outcome.history if entry["step"] == step and "eval_loss" in entry)
    assert outcome.validation["loss"] == kept["eval_loss"]


def test_progress_is_told_step_by_step(tmp_path: Path):
    told: list[tuple[str, int, int]] = []
    train(small("training.steps=12", "training.every=0"), tmp_path, progress=lambda *what: told.append(what))
    assert [done for _, done, _ in told] == list(range(1, 13))
    assert told[-1][0].startswith("loss ")
    assert told[-1][2] == 12


def test_the_auxiliary_loss_is_in_the_loss_by_its_share(tmp_path: Path):
    losses = {}
    for share in ("0", "0.5"):
        given = ("model.method=lha:buckets=2", f"training.auxiliary={share}", "training.steps=10", "training.every=0")
        outcome = train(small(*given, "training.learning_rate=1e-12"), tmp_path / share)
        losses[share] = next(entry["loss"] for entry in outcome.history if "loss" in entry)
    assert losses["0"] == pytest.approx(math.log(13), rel=0.05)  # 13 symbols, nothing learned
    assert losses["0.5"] < 0.8 * losses["0"]  # the auxiliary loss of two buckets is at most ln 2 or so


# ---------------------------------------------------------------------- ends


def fail_at(step: int, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise in a forward pass in training."""
    forward, seen = MaskedSymbolEncoder.forward, [0]

    def failing(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen[0] += self.training
        if self.training and seen[0] == step:
            raise error
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(MaskedSymbolEncoder, "forward", failing)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: you tried to"),
        MemoryError(),
    ],
)
def test_memory_that_runs_out_says_what_to_do_and_the_run_goes_on(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as patch:
        fail_at(12, error, patch)
        with pytest.raises(Ended, match=r"out of memory with training\.batch=8 in training\.accumulate=1 passes"):
            train(small(), tmp_path)
    assert (tmp_path / "checkpoint-8" / "seal.json").exists()
    if isinstance(error, MemoryError):
        assert train(small(), tmp_path).steps == 24


def test_another_error_of_torch_is_no_lack_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fail_at(2, RuntimeError("mat1 and mat2 shapes cannot be multiplied"), monkeypatch)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        train(small(), tmp_path)


@pytest.mark.parametrize(
    ("clip", "advice"), [(0.0, r"clipped gradients \(training.clip, now 0"), (1.0, "a smaller training")]
)
def test_the_advice_fits_the_run_that_diverged(clip: float, advice: str, tmp_path: Path):
    given = ("training.learning_rate=1e30", "training.every=0", "training.optimizer=adam", f"training.clip={clip}")
    with pytest.raises(Diverged, match=rf"there is no checkpoint before it\. A lower .* or {advice}"):
        train(small(*given), tmp_path)


def test_a_learning_rate_that_is_too_high_ends_it_before_a_bad_checkpoint(tmp_path: Path):
    given = ("training.learning_rate=1e30", "training.every=1", "training.optimizer=adam")
    with pytest.raises(Diverged, match=r"(the loss|the gradient's norm) is (nan|inf) at step \d+; .*learning_rate"):
        train(small(*given), tmp_path)
    for checkpoint in tmp_path.glob("checkpoint-*"):
        weights = torch.load(checkpoint / "optimizer.pt", weights_only=True)["state"]
        assert all(torch.isfinite(value).all() for entry in weights.values() for value in entry.values())


def test_a_gradient_that_is_no_number_ends_it_before_the_weights_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    forward, seen = MaskedSymbolEncoder.forward, [0]

    def spoilt(self: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = forward(self, *args, **kwargs)
        seen[0] += self.training
        if self.training and seen[0] == 12:
            outputs.loss.register_hook(lambda gradient: gradient * math.nan)
        return outputs

    with monkeypatch.context() as patch:
        patch.setattr(MaskedSymbolEncoder, "forward", spoilt)
        with pytest.raises(Diverged, match="the gradient's norm is nan at step 12"):
            train(small(), tmp_path)
    assert train(small(), tmp_path).steps == 24


def test_a_weight_that_is_no_number_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    figures = MaskedCopy.metrics
    model: list[torch.nn.Module] = []
    built = MaskedCopy.model
    monkeypatch.setattr(MaskedCopy, "model", lambda self, settings: model.append(built(self, settings)) or model[0])

    def spoil(self: Any, scores: Any) -> Any:
        with torch.no_grad():
            next(model[0].parameters()).view(-1)[0] = math.inf
        return figures(self, scores)

    monkeypatch.setattr(MaskedCopy, "metrics", spoil)
    with pytest.raises(Diverged, match=r"encoder\.\S+ is not finite at step 8, and is not saved"):
        train(small(), tmp_path)
    assert not list(tmp_path.glob("checkpoint-*"))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("model.method=['full', 'full', 'full']", "3 methods are given, but the model has 1 attention layers"),
        ("model.heads=3", "model.width=16 is not a multiple of model.heads=3"),
        ("model.kv_heads=3", "model.heads=2 is not a multiple of model.kv_heads=3"),
        ("model.method=sinkhorn:block=0", "block=0"),
    ],
)
def test_what_the_model_cannot_be_or_run_is_one_line(given: str, says: str, tmp_path: Path):
    with pytest.raises(InputError, match=says):
        train(small(given), tmp_path)


def test_a_batch_that_processes_cannot_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(InputError, match=r"training\.batch=8 does not divide among 3 processes .* a multiple of 3"):
        train(small(), tmp_path)


def test_a_device_by_number_is_chosen_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("subquad.research.training.run.check_device", lambda device: None)
    with pytest.raises(InputError, match="CUDA_VISIBLE_DEVICES=1"):
        train(small(), tmp_path, device="cuda:1")
