"""Compare compiled models with eager ones, in a process without run-time type checks, which Dynamo cannot trace."""

import torch

from subquad.research.training.models import EncoderClassifier
from tests.research.training.models.build import METHODS, batch_for, build


def check(method: str) -> None:
    model, batch = build(method=method), batch_for(EncoderClassifier)
    losses = [model(**batch).loss, torch.compile(model, backend="aot_eager")(**batch).loss]
    want, have = (torch.autograd.grad(loss, list(model.parameters())) for loss in losses)
    torch.testing.assert_close(losses[1], losses[0])
    torch.testing.assert_close(have, want, atol=1e-5, rtol=1e-4)


if __name__ == "__main__":
    check("full")
    check(METHODS["i-clustered"])
