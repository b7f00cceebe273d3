"""Compile and export decoders with longer rotary positions, and compare them with the same models run as they are.

A process of its own, because Dynamo cannot trace the run-time type checks that pytest switches on here.
"""

import torch
import transformers as hf

import subquad as sq
from tests.library.hf.models import VOCAB, build

LENGTHS = ([90, 20], [40, 20])  # past the 64 positions of the models, and within


def inputs(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return torch.randint(5, VOCAB, mask.shape) * mask, mask


@torch.no_grad()
def check(name: str) -> None:
    model = sq.hf.extend_positions(build(name).model, 100)
    model.config.use_cache = False
    batches = [inputs(lengths) for lengths in LENGTHS]
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


@torch.no_grad()
def check_steps(name: str) -> None:
    """A compiled step on a static cache reads it as it was filled."""
    model = sq.hf.extend_positions(build(name).model, 100)
    compiled = torch.compile(model, backend="aot_eager")
    ids = torch.randint(5, VOCAB, (1, 90))
    for tokens, reach in ((80, 80), (30, 90), (30, 60)):
        want = model(input_ids=ids[:, : tokens + 3] if tokens == 80 else ids[:, :reach]).logits
        cache = hf.StaticCache(config=model.config, max_cache_len=100)
        with sq.hf.reaching(model, reach):
            model(input_ids=ids[:, :tokens], past_key_values=cache)
        for at in range(tokens, want.shape[1]):
            step = compiled(input_ids=ids[:, at : at + 1], past_key_values=cache, position_ids=torch.tensor([[at]]))
        torch.testing.assert_close(step.logits[:, -1], want[:, -1], atol=1e-5, rtol=1e-5)


if __name__ == "__main__":
    for each in ("llama", "phi"):
        check(each)
    check_steps("llama")
