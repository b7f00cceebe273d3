"""The auxiliary losses of a model: collected, averaged, and apart from the task's gradient."""

import copy

import pytest
import torch

import subquad as sq
from subquad import Mask
from subquad.nn import auxiliary_loss, with_auxiliary_loss
from subquad.testing.oracle import normal
from tests.library.hf.models import build

LHA = "lha:buckets=3,hidden=8"


def layer(method: str = LHA, **options: int) -> sq.nn.MultiheadAttention:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return sq.nn.MultiheadAttention(32, 4, method=method, **options)


def grads(loss: torch.Tensor, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The gradients that there are, by name; the graph stays."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
    return {name: grad for name, grad in zip(names, found, strict=True) if grad is not None}


def learned(name: str) -> bool:
    return ".learned." in name


MASKS = {"plain": Mask(), "padding": Mask.padding([24, 9]), "causal": Mask.causal()}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("method", [LHA, f"mixed-heads:methods=local:window=3+{LHA.replace(',', ';')}"])
def test_task_and_auxiliary_loss_are_of_separate_parameters(method, kv_heads, mask):
    model, x = layer(method, kv_heads=kv_heads), normal(2, 24, 32).requires_grad_()
    task = model(x, mask=mask).square().mean()
    loss = auxiliary_loss(model)
    assert loss.shape == ()
    of_task, of_auxiliary = grads(task, model), grads(loss, model)
    assert of_auxiliary
    assert all(learned(name) for name in of_auxiliary)
    assert not any(learned(name) for name in of_task)
    assert of_task.keys() | of_auxiliary.keys() == dict(model.named_parameters()).keys()
    assert all(grad.abs().max() > 0 for name, grad in of_auxiliary.items() if "weights" in name)
    assert torch.autograd.grad(loss, x, allow_unused=True) == (None,)


def test_the_sum_is_weighted_as_in_equation_19():
    model, x = layer(), normal(2, 24, 32)
    task = model(x).square().mean()
    together = with_auxiliary_loss(task, model)
    model(x)
    alone = auxiliary_loss(model)
    torch.testing.assert_close(together, 0.95 * task + 0.05 * alone)
    of_task, of_auxiliary, of_sum = grads(task, model), grads(alone, model), grads(together, model)
    wanted = {name: 0.95 * g for name, g in of_task.items()} | {name: 0.05 * g for name, g in of_auxiliary.items()}
    torch.testing.assert_close(of_sum, wanted)


@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_every_weight_from_0_to_1(weight):
    model = layer()
    task = model(normal(2, 24, 32)).square().mean()
    model(normal(2, 24, 32))
    loss = with_auxiliary_loss(task, model, weight)
    model(normal(2, 24, 32))
    torch.testing.assert_close(loss, (1 - weight) * task + weight * auxiliary_loss(model))


@pytest.mark.parametrize("weight", [-0.1, 1.5, float("nan"), float("inf")])
def test_other_weights_are_refused_before_the_loss_is_taken(weight):
    model = layer()
    task = model(normal(2, 24, 32)).mean()
    with pytest.raises(ValueError, match=f"weight={weight}, but it must be a number from 0 to 1"):
        with_auxiliary_loss(task, model, weight)
    assert auxiliary_loss(model).isfinite()


@pytest.mark.parametrize(
    ("task", "error", "message"),
    [
        (0.5, TypeError, "task_loss is a float, but it must be a tensor"),
        (torch.ones(2, 3), ValueError, r"task_loss is \(2, 3\), but it must be a scalar"),
    ],
)
def test_other_task_losses_are_refused_before_the_loss_is_taken(unchecked, task, error, message):
    model = layer()
    model(normal(2, 24, 32))
    with pytest.raises(error, match=message):
        with_auxiliary_loss(task, model)
    assert auxiliary_loss(model).isfinite()


def test_the_mean_is_over_the_layers_that_ran():
    model, x = (
        torch.nn.ModuleList([layer(), layer("full"), layer("lha:buckets=5,hidden=8"), layer()]),
        normal(2, 24, 32),
    )
    alone = []
    for number in (0, 2):
        model[number](x)
        alone.append(auxiliary_loss(model))
    for number in (0, 1, 2):
        model[number](x)
    torch.testing.assert_close(auxiliary_loss(model), (alone[0] + alone[1]) / 2)


def test_padding_does_not_change_it():
    model, x = layer(), normal(1, 15, 32)
    model(x)
    alone = auxiliary_loss(model)
    model(torch.cat([x, 50 * normal(1, 9, 32, seed=1)], dim=1), mask=Mask.padding([15]))
    torch.testing.assert_close(auxiliary_loss(model), alone)


def test_under_autocast():
    model, x = layer(kv_heads=2), normal(2, 24, 32)
    model(x)
    exact = auxiliary_loss(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        task = model(x, mask=Mask.padding([24, 24])).float().square().mean()
        loss = with_auxiliary_loss(task, model, 1.0)
    torch.testing.assert_close(loss, exact, rtol=0.05, atol=0.05)
    assert loss.dtype == torch.float32
    assert all(learned(name) == (grad.abs().max() > 0) for name, grad in grads(loss, model).items())


@pytest.mark.parametrize("method", [LHA, "mixed-heads:methods=2*local:window=3+lha:buckets=3+full"])
def test_in_a_pretrained_model(method):
    case = build("bert")
    sq.hf.swap(case.model, method)
    case.model.train()
    task = case.output().square().mean()
    loss = auxiliary_loss(case.model)
    of_task, of_auxiliary = grads(task, case.model), grads(loss, case.model)
    hashes = {name for name, _ in case.model.named_parameters() if learned(name)}
    assert len(hashes) == 2 * 8  # two layers, H_Q and H_K, two weights and two biases
    assert of_auxiliary.keys() == hashes
    assert not hashes & of_task.keys()
    case.output()
    assert grads(with_auxiliary_loss(task, case.model), case.model).keys() == of_task.keys() | hashes


def test_descent_on_it_lowers_it():
    model, x = layer(), normal(2, 24, 32)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        model(x)
        losses.append(auxiliary_loss(model))
        optimiser.zero_grad()
        losses[-1].backward()
        optimiser.step()
    assert losses[-1] < 0.8 * losses[0]


# ---------------------------------------------------------------------- what there is none of


def test_it_is_forgotten_once_taken():
    model = layer()
    model(normal(2, 24, 32))
    auxiliary_loss(model)
    with pytest.raises(ValueError, match="no auxiliary loss was computed in this MultiheadAttention"):
        auxiliary_loss(model)


def test_in_eval_mode_and_without_gradients_there_is_none():
    model = torch.nn.ModuleList([layer(), layer()])
    model[0].eval()
    model[0](normal(2, 24, 32))
    with pytest.raises(ValueError, match=r"1 of its 2 layers with one are in eval mode: call model\.train\(\)"):
        auxiliary_loss(model)
    model.train()
    with torch.no_grad():
        model[0](normal(2, 24, 32))
    with pytest.raises(ValueError, match="with gradients, for each call; its layers are in training mode"):
        auxiliary_loss(model)


@pytest.mark.parametrize("method", ["full", "local:positions=relative", "mixed-heads:methods=local+full"])
def test_a_model_without_such_layers_says_so(method):
    model = layer(method)
    model(normal(2, 24, 32))
    with pytest.raises(ValueError, match=r"no attention layer of this MultiheadAttention has .*: lha"):
        with_auxiliary_loss(torch.zeros(()), model)
    with pytest.raises(ValueError, match="no attention layer of this Linear"):
        auxiliary_loss(torch.nn.Linear(2, 2))


def test_a_layer_can_be_copied_between_forward_and_loss():
    model = layer()
    model(normal(2, 24, 32))
    other = copy.deepcopy(model)
    assert auxiliary_loss(model).isfinite()
    with pytest.raises(ValueError, match="since the last call"):
        auxiliary_loss(other)
    other(normal(2, 24, 32))
    assert auxiliary_loss(other).isfinite()
