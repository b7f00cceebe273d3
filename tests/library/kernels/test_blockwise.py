"""Exact attention by blocks of keys: torch's fused kernels against logits, forward and backward."""

import pytest
import torch

import subquad as sq
from subquad.distributed.attention.blockwise import exact_partial
from subquad.kernels.attention.blockwise import kernels, views
from subquad.kernels.attention.softmax import visible_logsumexp, visible_softmax
from subquad.kernels.tokens.heads import repeat_heads
from subquad.testing.oracle import normal

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]
MASKS = {
    "none": sq.Mask(),
    "causal": sq.Mask.causal(),
    "causal, padded": sq.Mask.causal() & sq.Mask.padding(torch.tensor([7, 3])),
    "one sees nothing": sq.Mask.padding(keys=torch.tensor([7, 0])),
    "window": sq.Mask.window(2),
    "segments": sq.Mask.segments(torch.tensor([[0, 0, 0, 1, 1, 1, -1], [0, 1, 1, 1, 1, 2, 2]])),
}


def outputs(attend, inputs: list[torch.Tensor], device: str) -> list[torch.Tensor]:
    """Out, lse, and the gradients of a loss that depends on both."""
    q, k, v = (x.to(device).requires_grad_() for x in inputs)
    out, lse = attend(q, k, v)
    total = (out * normal(*out.shape, seed=7).to(device)).sum() + lse.where(~lse.isneginf(), 0.0).square().sum()
    return [out, lse, *torch.autograd.grad(total, (q, k, v))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "logits"])
@pytest.mark.parametrize(("name", "scale"), [*((name, 0.4) for name in MASKS), ("causal", -0.4), ("causal", 0.0)])
def test_partials_and_gradients_are_those_of_the_logits(
    name: str, scale: float, fused: bool, device: str, monkeypatch: pytest.MonkeyPatch
):
    inputs, mask = [normal(2, 4, 7, 8), normal(2, 2, 7, 8, seed=1), normal(2, 2, 7, 5, seed=2)], MASKS[name]
    visible = mask.visible(7, 7, torch.device("cpu"))
    monkeypatch.setattr(views, "LOGITS", 14)  # two queries at a time

    def want(q, k, v):
        logits = q @ repeat_heads(k, 4).mT * scale
        seen = torch.ones_like(logits, dtype=torch.bool) if visible is None else visible.expand_as(logits)
        return visible_softmax(logits, seen) @ repeat_heads(v, 4), visible_logsumexp(logits, seen)

    wanted = outputs(want, inputs, "cpu")
    if not fused:
        monkeypatch.setattr(kernels, "on_cpu", lambda query: False)
        monkeypatch.setattr(kernels, "on_gpu", lambda query: False)
    moved = mask if device == "cpu" else sq.Mask(**{k: _to(v, device) for k, v in vars(mask).items()})
    found = outputs(lambda *x: exact_partial(*x, moved, scale=scale), inputs, device)
    for w, f in zip(wanted, found, strict=True):
        torch.testing.assert_close(f.cpu(), w, atol=2e-5, rtol=1e-4)


def _to(value, device: str):
    return tuple(x.to(device) for x in value) if isinstance(value, tuple) else value


def test_only_what_a_mask_shows_is_computed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(views, "LOGITS", 40)
    view = views.View(N=8, M=10, ahead=-4, is_causal=True, span=2, valid=None, ids=())
    pieces = list(view.pieces(torch.device("cpu")))
    assert [(p.rows, p.keys) for p in pieces] == [(slice(0, 4), slice(2, 8)), (slice(4, 8), slice(6, 10))]
    whole = list(
        views.View(N=8, M=10, ahead=-12, is_causal=True, span=None, valid=None, ids=()).pieces(torch.device("cpu"))
    )
    assert whole == [views.Piece(slice(0, 8), slice(0, 10))]  # all keys are before all queries


def test_a_second_derivative_is_refused():
    q = normal(1, 1, 3, 4).requires_grad_()
    out, _ = exact_partial(q, q, q, sq.Mask(), scale=1.0)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(out.sum(), q, create_graph=True)
