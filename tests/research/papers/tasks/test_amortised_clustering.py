"""Amortised clustering: the sets, the likelihood, the baselines, a short training run."""

import math

import numpy as np
import pytest
import torch
from sklearn.mixture import GaussianMixture

import subquad as sq
from subquad.core.errors import InputError
from subquad.research.papers.tasks.amortised_clustering import Clusters
from subquad.research.training.models import MixtureModel, SetConfig
from subquad.research.training.models.mixture_model import set_log_likelihood
from subquad.research.training.run import read_saved, train
from subquad.research.training.settings import settings_of

SMALL = Clusters(smallest=20, largest=60, held_out=6)
SIZES = {"layers": 1, "heads": 2, "width": 16, "feed_forward": 16}


def test_sets_are_drawn_as_the_settings_say():
    train_sets, validation, test = (SMALL.splits().train, SMALL.splits().validation, SMALL.splits().test)
    items = [train_sets[i] for i in range(60)]
    assert all(20 <= len(item["values"]) <= 60 for item in items)
    assert len({len(item["values"]) for item in items}) > 10
    assert all(np.array_equal(item["values"], train_sets[i]["values"]) for i, item in enumerate(items[:5]))
    assert not np.array_equal(validation[0]["centres"], test[0]["centres"])
    centres, shares = (np.concatenate([item[name].ravel() for item in items]) for name in ("centres", "shares"))
    assert np.abs(centres).max() <= 4.0
    assert np.abs(centres).mean() == pytest.approx(2.0, abs=0.2)
    assert shares.sum() == pytest.approx(60)
    apart = [
        np.abs(item["values"][:, None] - item["centres"]).max(-1).min(1) for item in items
    ]  # the nearest centre is a few deviations away
    assert np.concatenate(apart).max() < 5 * 0.3


def test_the_likelihood_is_that_of_scikit_learn():
    values = SMALL.splits().test[0]["values"]
    fitted = GaussianMixture(3, covariance_type="diag", random_state=0).fit(values)
    parameters = (np.log(fitted.weights_), fitted.means_, np.sqrt(fitted.covariances_))
    padded = torch.zeros(2, len(values) + 5, 2).double()
    padded[0, : len(values)] = torch.from_numpy(values)
    padded[0, len(values) :] = math.nan
    sizes = torch.tensor([len(values), 0])
    got = set_log_likelihood(padded, sizes, *(torch.from_numpy(x).expand(2, *x.shape) for x in parameters))
    assert got.tolist() == pytest.approx([fitted.score(values), 0.0], abs=1e-5)


def test_the_oracle_is_above_one_gaussian_and_near_expectation_maximisation():
    task = Clusters(held_out=8)
    found = {name: figures["log_likelihood"] for name, figures in task.baselines(task.splits()).items()}
    assert found["oracle"] > found["one Gaussian"] + 1
    assert found["k-means and EM"] == pytest.approx(found["oracle"], abs=0.3)


def test_a_model_sees_sets_of_every_size_and_no_order():
    model = SMALL.model(settings_of("clusters", {"model": SIZES}).model).eval()
    items = [SMALL.splits().test[i] for i in range(3)]
    batch = SMALL.collate(items)
    out = model(**batch)
    for row, item in enumerate(items):
        order = np.random.default_rng(0).permutation(len(item["values"]))
        alone = model(**SMALL.collate([{"values": item["values"][order]}]))
        torch.testing.assert_close(alone.log_likelihood, out.log_likelihood[row : row + 1], atol=1e-4, rtol=1e-4)
    loss = float(out.loss.detach())
    assert loss == pytest.approx(-float(out.log_likelihood.detach().mean()))
    assert SMALL.metrics(SMALL.score(out, batch).detach()) == pytest.approx({"log_likelihood": -loss})


def test_it_learns_and_is_saved(tmp_path):
    tables = {"task": {"smallest": 10, "largest": 20, "held_out": 8, "points": 4}, "model": SIZES}
    training = {"training": {"steps": 30, "batch": 8, "learning_rate": 3e-3, "every": 15}}
    outcome = train(settings_of("clusters", tables, training), tmp_path / "run")
    first, last = (entry["eval_log_likelihood"] for entry in outcome.history if "eval_log_likelihood" in entry)
    assert last > first
    outcome.settings.task.save(outcome.model, tmp_path / "model")
    loaded = read_saved(MixtureModel, tmp_path / "model").eval()
    batch = SMALL.collate([SMALL.splits().test[0]])
    assert torch.equal(loaded(**batch).means, outcome.model(**batch).means)


def test_methods_with_random_features_come_back(tmp_path):
    model = MixtureModel(SetConfig(hidden_size=16, num_attention_heads=2, method="performer:features=8")).eval()
    model.save_pretrained(tmp_path)
    values = torch.randn(2, 30, 2, generator=torch.Generator().manual_seed(0))
    loaded = MixtureModel.from_pretrained(tmp_path).eval()
    assert torch.equal(loaded(values).means, model(values).means)
    assert sq.parse_method(loaded.config.method) == sq.Performer(features=8)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"task": {"largest": 10}}, "largest=10, but it must be at least smallest=100"),
        ({"task": {"deviation": 0.0}}, "deviation=0.0 and reach=4.0 must be more than 0"),
        ({"task": {"components": 0}}, "components=0, but it must be at least 1"),
        ({"model": {"positions": "rotary"}}, "positions='rotary', but a set has no order: it must be 'none'"),
        ({"model": {"method": "local"}}, "'local' cannot run in InducedSetAttention"),
        ({"model": {"method": ["full", "full"]}}, "2 methods are given, but a model of sets has one"),
        ({"model": {"kv_heads": 2}}, "as many heads of keys and values as of queries"),
        ({"model": {"attention_dropout": 0.5}}, "attention_dropout=0.5, but in a model of sets it is `dropout`"),
        ({"model": {"piece": 5}}, "piece=5 is for causal language models"),
    ],
)
def test_settings_that_are_refused(tables, message, tmp_path):
    with pytest.raises(InputError, match=message):
        train(settings_of("clusters", tables), tmp_path / "run")
