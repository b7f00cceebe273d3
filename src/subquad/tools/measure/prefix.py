"""Run only the last blocks of a model, with the outputs of its first blocks from an earlier pass.

A model whose attention layers lie in one chain of blocks (an encoder, a decoder) computes the same up to the block in
which something is changed. With `kept` and `skipping`, only what follows is computed:

    blocks = chain(model, layers)                        None where the layers do not lie in one chain
    with kept(blocks) as outputs: model(**inputs)        a whole pass
    with skipping(blocks[:5], outputs): model(**inputs)  blocks 0 to 4 return what they returned
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Chain:
    """Blocks that run one after the other, and the block in which each attention layer lies."""

    blocks: tuple[nn.Module, ...]
    of_layer: dict[int, int]

    def before(self, layer: int) -> tuple[nn.Module, ...]:
        """The blocks in front of this layer's."""
        return self.blocks[: self.of_layer[layer]]


def chain(model: Any, layers: Sequence[Any]) -> Chain | None:
    """The outermost list of blocks that holds all attention layers; None where there is none, or they are not in order.

    Whether the blocks of such a list do run one after the other, and only once, is for the caller to try.
    """
    from subquad import hf

    for name, module in hf.transformers_model(model).named_modules():  # layers have their names inside of it
        if not isinstance(module, nn.ModuleList) or not name:
            continue
        blocks = [_block_number(layer.name, name) for layer in layers]
        if all(block is not None for block in blocks):
            at = [block for block in blocks if block is not None]
            numbers = {layer.number: block for layer, block in zip(layers, at, strict=True)}
            return Chain(tuple(module), numbers) if at == sorted(at) else None
    return None


def _block_number(layer: str, blocks: str) -> int | None:
    """The number of a list's block in which the layer of this name lies."""
    if not layer.startswith(f"{blocks}."):
        return None
    number = layer.removeprefix(f"{blocks}.").partition(".")[0]
    return int(number) if number.isdecimal() else None


@contextmanager
def kept(blocks: Sequence[nn.Module]) -> Iterator[list[Any]]:
    """Collect what each block returns in a forward pass inside."""
    outputs: list[Any] = [None] * len(blocks)
    handles = []
    for number, block in enumerate(blocks):

        def keep(module: nn.Module, inputs: Any, output: Any, number: int = number) -> None:
            outputs[number] = output

        handles.append(block.register_forward_hook(keep))
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def skipping(blocks: Sequence[nn.Module], outputs: Sequence[Any]) -> Iterator[None]:
    """Make these blocks return given values instead of computing."""
    with ExitStack() as stack:
        for block, output in zip(blocks, outputs, strict=False):
            stack.enter_context(giving(block, output))
        yield


@contextmanager
def giving(module: nn.Module, output: Any) -> Iterator[None]:
    """Make a module return a given value; a `forward` that another library put on this module alone comes back."""
    before = vars(module).get("forward")
    vars(module)["forward"] = lambda *args, **options: output
    try:
        yield
    finally:
        del vars(module)["forward"]
        if before is not None:
            vars(module)["forward"] = before
