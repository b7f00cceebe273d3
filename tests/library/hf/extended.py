"""Compile, export and trace models with longer positions, and compare them with the same models run as they are.

A process of its own, because Dynamo cannot trace the run-time type checks that pytest switches on here.
"""

import torch

import subquad as sq
from tests.library.hf.models import VOCAB, build

LENGTHS = ([90, 20], [40, 20])  # past the 64 positions of the models, and within


def inputs(lengths: list[int], name: str) -> tuple[torch.Tensor, torch.Tensor]:
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    mask = mask.flip(1) if name in ("gpt2", "opt") else mask
    return torch.randint(5, VOCAB, mask.shape) * mask, mask


@torch.no_grad()
def check(name: str, mode: str) -> None:
    model = sq.hf.extend_positions(build(name).model, 100, mode=mode)
    model.config.use_cache = False
    batches = [inputs(lengths, name) for lengths in LENGTHS]
    want = [model(input_ids=ids, attention_mask=mask)[0] for ids, mask in batches]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(model, backend="aot_eager")
    for (ids, mask), output in zip(batches, want, strict=True):
        torch.testing.assert_close(compiled(input_ids=ids, attention_mask=mask)[0], output, atol=1e-5, rtol=1e-5)
    breaks = dict(torch._dynamo.utils.counters["graph_break"])
    assert not breaks, breaks
    for (ids, mask), output in zip(batches, want, strict=True):
        program = torch.export.export(model, (), {"input_ids": ids, "attention_mask": mask}, strict=False).module()
        torch.testing.assert_close(program(input_ids=ids, attention_mask=mask)[0], output, atol=1e-5, rtol=1e-5)


def check_trace() -> None:
    """A traced encoder reads its positions by the length of what it is given, not of what it was traced with."""
    model = sq.hf.extend_positions(build("bert").model, 100)
    model.config.return_dict = False
    (long, long_mask), (short, short_mask) = (inputs(lengths, "bert") for lengths in LENGTHS)
    with torch.no_grad():
        traced = torch.jit.trace(model, (short, short_mask), check_trace=False)
        for ids, mask in ((long, long_mask), (short, short_mask)):
            torch.testing.assert_close(traced(ids, mask)[0], model(ids, mask)[0], atol=1e-5, rtol=1e-5)


if __name__ == "__main__":
    # Each model, and each mode in an encoder and in a decoder: how a table is read does not depend on whose it is.
    for case in (("bert", "interpolate"), ("roberta", "tile"), ("gpt2", "tile"), ("opt", "interpolate")):
        check(*case)
    check_trace()
