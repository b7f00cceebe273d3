"""Cases of whole layers: bound methods with their parameters, and the options of a call."""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import subquad as sq
from subquad.testing.oracle import normal
from tests.library.distributed import ranks

WIDTH = 4  # of a head


@dataclass(frozen=True)
class Layer:
    """A layer on some ranks: its outputs, the gradients of its inputs, and the parameters' added over the ranks."""

    method: str
    mode: str = "heads"
    mask: str = "none"
    options: str = ""  # "keep", "kept bools", "bias", "one bias", "dense", "offset", "lse": with spaces between them
    heads: int = 5
    kv_heads: int = 5
    lengths: tuple[int, ...] | None = None
    training: bool = False
    dtype: torch.dtype = torch.float32

    @property
    def name(self) -> str:
        """The settings that are not the defaults, in one word."""
        own = [str(value) for field, value in vars(self).items() if value != getattr(Layer, field, None)]
        return "layer-" + "-".join(own).replace(" ", "_")

    def error(self) -> float:
        """The largest difference of this rank's numbers from those of one process."""
        count = dist.get_world_size()
        if self.lengths is None:
            of = sq.distributed.Sequence.even(ranks.TOKENS, mode=self.mode)
        else:
            of = sq.distributed.Sequence(ranks.shares(self.lengths, count), mode=self.mode)
        whole, part = ranks.masks(self.mask, 2)
        g = normal(2, self.heads, ranks.TOKENS, WIDTH, seed=3)
        alone, split = (bound(self.method, self.heads, self.kv_heads).train(self.training) for _ in range(2))
        inputs = self.inputs()
        own = {name: of.shard(x.detach(), dim=axis(name)).clone().requires_grad_() for name, x in inputs.items()}

        want = self.run(alone, inputs, whole(), self.how())
        objective(alone, want, g).backward()
        have = self.run(split, own, part(of), self.how(of), parallel=of)
        objective(split, have, of.shard(g, dim=2)).backward()

        outs = (want, have) if "lse" in self.options else ((want,), (have,))
        pairs = [(of.shard(w, dim=2), h) for w, h in zip(*outs, strict=True)]
        for name, x in inputs.items():
            pairs.append((of.shard(ranks.gradient(x), dim=axis(name)), ranks.gradient(own[name])))
        pairs += list(of_parameters(alone, split))
        return max(ranks.far(w, h) for w, h in pairs)

    def inputs(self) -> dict[str, Tensor]:
        """The tensors that have a gradient."""
        N, H, G = ranks.TOKENS, self.heads, self.kv_heads
        given = {"query": normal(2, H, N, WIDTH)}
        given |= {name: normal(2, G, N, WIDTH, seed=seed) for seed, name in enumerate(("key", "value"), 1)}
        if sq.parse_method(self.method).traits.needs_hidden:
            given["hidden"] = normal(2, N, H * WIDTH, seed=4)
        if "bias" in self.options:
            given["bias"] = normal(*((1, 1) if "one" in self.options else (2, H)), N, N, seed=5)
        return {name: x.clone().requires_grad_() for name, x in given.items()}

    def how(self, of: sq.distributed.Sequence | None = None) -> dict[str, Any]:
        """The other options, of all tokens or of this rank's."""
        how: dict[str, Any] = {"return_lse": "lse" in self.options, "seed": 3}
        if "kept" in self.options:
            kept = torch.arange(ranks.TOKENS).expand(2, -1) % 17 == torch.tensor([[1], [3]])
            how["keep"] = kept if of is None else of.shard(kept)
        elif "keep" in self.options:
            how["keep"] = [0, -1, 20]
        return how

    def run(self, layer: nn.Module, inputs: dict[str, Tensor], mask: sq.Mask, how: Any, parallel: Any = None) -> Any:
        """The layer's output."""
        if "dense" in self.options:
            dense = normal(1, self.heads, ranks.TOKENS, ranks.TOKENS, seed=6) > -1
            mask = mask & sq.Mask.dense(dense if parallel is None else parallel.shard(dense, dim=2))
        if "offset" in self.options:
            mask = replace(mask, offset=2)
        given = {name: x for name, x in inputs.items() if name not in ("query", "key", "value")}
        more = {} if parallel is None else {"parallel": parallel}
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled="autocast" in self.options):
            return layer(*(inputs[name] for name in ("query", "key", "value")), mask=mask, **given, **how, **more)


def axis(name: str) -> int:
    """The tokens' axis of an input."""
    return 1 if name == "hidden" else 2


def bound(method: str, heads: int, kv_heads: int) -> sq.methods.BoundMethod:
    """The method for one layer, with parameters that differ between heads; the same ones on each rank."""
    layer = sq.parse_method(method).bind(heads=heads, kv_heads=kv_heads, head_dim=WIDTH, max_length=ranks.TOKENS)
    with torch.no_grad():
        for seed, x in enumerate(layer.parameters()):
            x += 0.1 * normal(x.numel(), 1, 1, 1, seed=seed).view(x.shape)
    return layer


def objective(layer: nn.Module, given: Any, g: Tensor) -> Tensor:
    """A scalar that depends on every output, and on the auxiliary loss by numbers of about the same size."""
    extra = layer.auxiliary_loss()
    return ranks.loss(given, g) + (0.0 if extra is None else 100 * extra)


def of_parameters(alone: nn.Module, split: nn.Module) -> Any:
    """The gradients of parameters and the buffers of one process, and of all ranks together."""
    for want, have in zip(alone.parameters(), split.parameters(), strict=True):
        total = ranks.gradient(have).clone()
        dist.all_reduce(total)
        yield ranks.gradient(want), total
    yield from zip(alone.buffers(), split.buffers(), strict=True)
