"""Forecasting: windows, scaling, baselines, both models."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub.errors import StrictDataclassClassValidationError

from subquad import hf
from subquad.core.errors import InputError
from subquad.hf.layers import attached_to
from subquad.research.papers.data.ett import Series, waves
from subquad.research.papers.tasks.ett_forecast import Forecast, standardised
from subquad.research.training.models.forecaster import EncoderDecoderForecaster, EncoderForecaster, ForecastConfig
from subquad.research.training.run import train
from subquad.research.training.settings import settings_of

REAL = os.environ.get("SUBQUAD_DATA")
SMALL = {"seq_len": 12, "label_len": 6, "horizon": 4, "dataset": "waves"}
END = {"train": 360 * 4, "validation": 480 * 4, "test": 600 * 4}  # rows of the made series
HYBRID = "mixed-heads:methods=local:window=3+lha:buckets=2;hidden=4"


def small(**task):
    return Forecast(**(SMALL | task))


def model(method="full", **task):
    settings = {"task": SMALL | task, "model": {"width": 16, "heads": 2, "layers": 1, "method": method}}
    chosen = settings_of("forecast", settings)
    torch.manual_seed(0)
    return chosen.task, chosen.task.model(chosen.model).eval()


def batch(task, split="train", count=3):
    windows = getattr(task.splits(None), split)
    return task.collate([windows[i] for i in range(count)])


class TestWindows:
    @pytest.mark.parametrize("horizon", [1, 4, 30])
    def test_every_window_and_no_other(self, horizon):
        splits = small(horizon=horizon).splits(None)
        assert len(splits.train) == END["train"] - 12 - horizon + 1
        assert len(splits.validation) == len(splits.test) == 480 - horizon + 1

    @pytest.mark.parametrize("split", ["train", "validation", "test"])
    def test_first_and_last_row_predicted(self, split):
        task = small(features="M")
        windows = getattr(task.splits(None), split)
        rows = standardised(waves(), END["train"]).astype(np.float32)
        first = {"train": 12, "validation": END["train"], "test": END["validation"]}[split]
        np.testing.assert_array_equal(windows[0]["labels"], rows[first : first + 4])
        np.testing.assert_array_equal(windows[0]["past"], rows[first - 12 : first])
        np.testing.assert_array_equal(windows[len(windows) - 1]["labels"], rows[END[split] - 4 : END[split]])

    @pytest.mark.parametrize(("features", "read", "predicted"), [("S", 1, 1), ("MS", 7, 1), ("M", 7, 7)])
    def test_columns(self, features, read, predicted):
        item = small(features=features).splits(None).test[5]
        assert item["past"].shape == (12, read)
        assert item["labels"].shape == (4, predicted)
        assert item["times"].shape == (16, 5)
        everything = small(features="M").splits(None).test[5]
        np.testing.assert_array_equal(item["labels"], everything["labels"][:, -predicted:])
        np.testing.assert_array_equal(item["past"], everything["past"][:, -read:])

    def test_scaled_by_the_training_months_alone(self, monkeypatch):
        made = waves()
        shifted = made.values.copy()
        shifted[END["train"] :] += 100.0
        before = small(features="M").splits(None)
        monkeypatch.setattr("subquad.research.papers.tasks.ett_forecast.waves", lambda: replace(made, values=shifted))
        after = small(features="M").splits(None)
        last = len(before.train) - 1
        np.testing.assert_array_equal(before.train[last]["labels"], after.train[last]["labels"])
        spread = made.values[: END["train"]].std(0)
        np.testing.assert_allclose(
            after.test[30]["labels"] - before.test[30]["labels"], np.broadcast_to(100 / spread, (4, 7)), rtol=1e-4
        )
        whole = np.concatenate([before.train[0]["past"], *(before.train[i]["labels"][:1] for i in range(1425))])
        np.testing.assert_allclose(whole.mean(0), 0, atol=0.02)
        np.testing.assert_allclose(whole.std(0), 1, atol=0.02)

    def test_the_future_changes_no_input(self, monkeypatch):
        made, now = waves(), END["validation"] + 7
        before = small(features="M").splits(None).test[7]
        changed = made.values.copy()
        changed[now:] = -5.0
        monkeypatch.setattr("subquad.research.papers.tasks.ett_forecast.waves", lambda: replace(made, values=changed))
        after = small(features="M").splits(None).test[7]
        np.testing.assert_array_equal(before["past"], after["past"])
        np.testing.assert_array_equal(before["times"], after["times"])
        assert not np.array_equal(before["labels"], after["labels"])


class TestRefusals:
    @pytest.mark.parametrize(
        ("task", "said"),
        [
            ({"label_len": 13}, "label_len=13 is more than seq_len=12"),
            ({"horizon": 0}, "horizon=0, but it must be at least 1"),
            ({"dataset": "ETTx"}, "ETTx"),
            ({"features": "X"}, "features"),
            ({"cross_method": "fulll"}, "fulll"),
        ],
    )
    def test_settings(self, task, said):
        with pytest.raises(InputError, match=said):
            settings_of("forecast", {"task": SMALL | task})

    def test_horizon_of_no_window(self):
        with pytest.raises(InputError, match=r"task\.horizon=481 .* at most 480 rows"):
            small(horizon=481).splits(None)
        assert len(small(horizon=480).splits(None).test) == 1

    def test_data(self, tmp_path):
        with pytest.raises(InputError, match="--data-dir"):
            small(dataset="ETTh1").splits(None)
        with pytest.raises(InputError, match=r"neither ETTh1\.csv"):
            small(dataset="ETTh1").splits(tmp_path)

    def test_too_few_rows(self, monkeypatch):
        monkeypatch.setattr("subquad.research.papers.tasks.ett_forecast.waves", lambda: waves(days=599))
        with pytest.raises(InputError, match="2,396 rows, but 20 months of 30 days take 2,400"):
            small().splits(None)

    def test_windows_of_another_length(self):
        task, forecaster = model()
        given = batch(task)
        with pytest.raises(ValueError, match="reads 12 rows and predicts 4, but past has 11"):
            forecaster(given["past"][:, 1:], given["times"])


class TestBaselines:
    @pytest.fixture
    def ramp(self, monkeypatch):
        """Row t has the value t in every column; a day is 4 rows."""
        made = waves()
        values = np.repeat(np.arange(2400.0)[:, None], 7, axis=1)
        monkeypatch.setattr(
            "subquad.research.papers.tasks.ett_forecast.waves", lambda: Series(made.dates, values, made.per_day)
        )
        return values[: END["train"]].std()

    def test_by_hand(self, ramp):
        task = small(horizon=6, features="M")
        found = task.baselines(task.splits(None))
        # The last value is 1, …, 6 rows behind; the last day 4, 4, 4, 4, and then 8, 8.
        assert found["last value"]["mae"] == pytest.approx(3.5 / ramp)
        assert found["last value"]["mse"] == pytest.approx(91 / 6 / ramp**2)
        assert found["last season"]["mae"] == pytest.approx(32 / 6 / ramp)
        assert found["ridge"]["mae"] < 0.1 * found["last value"]["mae"]

    def test_ridge_beats_the_naive_ones_where_there_are_waves(self):
        task = small()
        found = task.baselines(task.splits(None))
        assert found["ridge"]["mse"] < 0.5 * min(found["last value"]["mse"], found["last season"]["mse"])

    @pytest.mark.data
    def test_measured_on_etth1(self):
        """Figures that were measured on their own before this was written; 9 windows fewer for the last day."""
        one, all_of_it = Forecast(features="S", horizon=24), Forecast(features="M", horizon=24)
        splits = one.splits(Path(REAL))
        assert [len(s) for s in (splits.train, splits.validation, splits.test)] == [8521, 2857, 2857]
        found = one.baselines(splits)
        assert found["last value"] == pytest.approx({"mse": 0.034, "mae": 0.139}, abs=5e-4)
        assert found["ridge"] == pytest.approx({"mse": 0.026, "mae": 0.122}, abs=5e-4)
        from subquad.research.papers.tasks.forecast_baselines import last_season

        test = all_of_it.splits(Path(REAL)).test
        error = (last_season(test, 24) - test.labels())[: 2857 // 32 * 32]
        assert float(np.square(error).mean()) == pytest.approx(0.426, abs=5e-4)
        assert float(np.abs(error).mean()) == pytest.approx(0.390, abs=5e-4)


class TestModels:
    @pytest.mark.parametrize("architecture", ["encoder-decoder", "encoder"])
    @pytest.mark.parametrize(("features", "targets"), [("S", 1), ("MS", 1), ("M", 7)])
    def test_shapes_and_loss(self, architecture, features, targets):
        task, forecaster = model(HYBRID, features=features, architecture=architecture)
        given = batch(task)
        out = forecaster(**given)
        assert out.logits.shape == (3, 4, targets)
        error = (out.logits - given["labels"]).square()
        torch.testing.assert_close(out.loss, error.flatten(1).mean(1).mean())
        scores = task.score(out, given)
        assert task.metrics(scores)["mse"] == pytest.approx(out.loss.item(), rel=1e-5)
        assert task.metrics(scores)["mae"] == pytest.approx(error.sqrt().mean().item(), rel=1e-5)

    def test_methods_in_self_and_cross_attention(self):
        _, forecaster = model(HYBRID, cross_method="clustered:clusters=3", decoder_layers=2)
        names = [attached_to(layer.module).bound.method.name for layer in hf.find_layers(forecaster)]
        assert names == ["mixed-heads", "mixed-heads", "clustered", "mixed-heads", "clustered"]

    def test_a_list_names_every_layer(self):
        _, forecaster = model(["clustered:clusters=3", "full", "i-clustered:clusters=3"])
        names = [attached_to(layer.module).bound.method.name for layer in hf.find_layers(forecaster)]
        assert names == ["clustered", "full", "i-clustered"]
        with pytest.raises(ValueError, match="2 methods are given, but the model has 3"):
            model(["full", "full"])

    def test_the_cross_method_runs(self):
        task, exact = model("full")
        _, clustered = model("full", cross_method="clustered:clusters=2")
        clustered.load_state_dict(exact.state_dict())
        assert not torch.equal(exact(**batch(task)).logits, clustered(**batch(task)).logits)

    def test_a_method_that_cannot_cross_is_refused(self):
        with pytest.raises(ValueError, match="cross"):
            model("full", cross_method="local:window=3")

    def test_causal_decoder(self):
        """A step's forecast depends on the times of later steps only without the mask."""
        for causal in (True, False):
            task, forecaster = model("full", causal_decoder=causal)
            given = batch(task)
            before = forecaster(**given).logits
            times = given["times"].clone()
            times[:, -1] += 0.3
            after = forecaster(given["past"], times).logits
            # The convolution reads values alone, so the last step's time reaches the others by attention alone.
            assert torch.allclose(before[:, :-1], after[:, :-1], atol=1e-7) == causal
        with pytest.raises(ValueError, match="training under a causal mask would leak the future"):
            model("clustered:clusters=3", causal_decoder=True)

    @pytest.mark.parametrize("architecture", ["encoder-decoder", "encoder"])
    def test_a_level_shifts_the_forecast(self, architecture):
        for subtracts in (True, False):
            task, forecaster = model(features="M", architecture=architecture, subtract_last=subtracts)
            given = batch(task)
            moved = forecaster(given["past"] + 10.0, given["times"]).logits
            assert torch.allclose(moved, forecaster(**given).logits + 10.0, atol=1e-3) == subtracts

    def test_the_decoder_reads_the_last_label_rows(self):
        """With the encoder's past hidden from it, it knows the last rows only."""
        task, forecaster = model("full", subtract_last=False)
        with torch.no_grad():
            forecaster.decoder.blocks[0].cross_attention.o_proj.weight.zero_()
        given = batch(task)
        before = forecaster(**given).logits
        for row, same in ((5, True), (6, False), (11, False)):
            past = given["past"].clone()
            past[:, row] += 1.0
            assert torch.equal(forecaster(past, given["times"]).logits, before) == same

    @pytest.mark.parametrize("kind", [EncoderDecoderForecaster, EncoderForecaster])
    def test_reload_bit_for_bit(self, kind, tmp_path):
        name = {EncoderDecoderForecaster: "encoder-decoder", EncoderForecaster: "encoder"}[kind]
        task, forecaster = model(HYBRID, architecture=name, cross_method="i-clustered:clusters=3,topk=2")
        assert type(forecaster) is kind
        forecaster.save_pretrained(tmp_path)
        again = kind.from_pretrained(tmp_path).eval()
        own, read = forecaster.state_dict(), again.state_dict()
        assert all(torch.equal(own[name], read[name]) for name in own)
        given = batch(task)  # matrix products differ in the last bit where weights begin at other addresses
        torch.testing.assert_close(forecaster(**given).logits, again(**given).logits, atol=1e-6, rtol=1e-6)

    @pytest.mark.parametrize(
        ("wrong", "said"),
        [
            ({"targets": 2}, "targets=2 is more than channels=1"),
            ({"label": 97}, "label=97 is more than past=96"),
            ({"horizon": 0}, "horizon=0, but it must be at least 1"),
        ],
    )
    def test_config_refuses(self, wrong, said):
        with pytest.raises(StrictDataclassClassValidationError, match=said):
            ForecastConfig(**wrong)


def test_trained_it_beats_the_naive_forecasts(tmp_path):
    settings = settings_of(
        "forecast",
        {
            "task": SMALL | {"seq_len": 28, "label_len": 4},
            "model": {"width": 16, "heads": 2, "layers": 1, "method": HYBRID, "dropout": 0.0},
            "training": {"steps": 60, "batch": 16, "learning_rate": 2e-2},
        },
    )
    outcome = train(settings, tmp_path)
    naive = settings.task.baselines(outcome.splits)
    assert outcome.test["mse"] < 0.5 * min(naive["last value"]["mse"], naive["last season"]["mse"])
