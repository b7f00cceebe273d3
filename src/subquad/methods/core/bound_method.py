"""Bound methods: a method attached to one layer, with its learned parameters, as a module."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from subquad.core.readable import has_left_vmap
from subquad.core.shapes import Sizes
from subquad.masks import Mask
from subquad.methods.core.call import Call
from subquad.methods.core.checks import only_bound, without_autocast
from subquad.methods.core.current_shard import in_use, refuse_in_use
from subquad.methods.core.recurrence import check_state, check_step_mask


class BoundMethod(nn.Module):
    """A method attached to one layer, called like the method, for the layer's numbers of heads."""

    watch: Any = None  # an audit of this layer, `audits.watch.LayerWatch`, which then runs the method

    def __init__(
        self,
        method: Any,  # a Method, whose module imports this one
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        learned: nn.Module | None = None,
        max_length: int | None = None,
    ):
        super().__init__()
        self.method = method
        self.heads, self.kv_heads, self.head_dim, self.max_length = heads, kv_heads, head_dim, max_length
        self.learned = learned
        self._loss: Tensor | None = None
        self._shapes: dict[int, dict[str, torch.Size]] = {}  # of the state of one item, by the values' width

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        """Attention by this method, with the options of `subquad.attention`; stores the auxiliary loss in training."""
        options["parallel"] = in_use(options.get("parallel"))
        if options["parallel"] is not None and torch.compiler.is_compiling():
            # Every exchange would break the graph: tens of small graphs, each compiled on its own, for minutes.
            return torch.compiler.disable(self.forward)(query, key, value, **options)
        query, key, value, call = self.prepare(query, key, value, **options)
        if self.watch is not None and call.parallel is not None:
            raise ValueError(
                "sq.audit is not supported with `parallel`: it would compute exact rows from this rank's keys alone; "
                "audit the model on one rank"
            )
        if self.learned is not None and self.training and torch.is_grad_enabled():
            self._loss = self.method.run_auxiliary_loss(query, key, value, call)
        if self.watch is not None:
            return self.watch(self.method, query, key, value, call)
        return self.method.run(query, key, value, call)

    def prepare(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor, Call]:
        """Prepare a call (`Method.prepare`) with the learned parameters."""
        options["enable_gqa"] = bool(self.heads != self.kv_heads)
        query, key, value, call = self.method.prepare(query, key, value, learned=self.learned, **options)
        if query.shape[1:4:2] != (self.heads, self.head_dim) or key.shape[1] != self.kv_heads:
            raise ValueError(
                f"this layer was bound for {self.heads} heads of width {self.head_dim} and {self.kv_heads} key heads, "
                f"but `query` is {tuple(query.shape)} and `key` is {tuple(key.shape)}"
            )
        return query, key, value, call

    def init_state(self, batch: int, *, like: Tensor, value_dim: int | None = None) -> dict[str, Tensor]:
        """The state before the first token, for `step`: tensors whose first axis is the batch.

        Args:
            batch: items.
            like: a tensor with the device and the dtype of the queries; the state is in fp32, or better where it is.
            value_dim: the width of the values, where it is not that of the heads.

        Raises:
            ValueError: the method is not recurrent, or there is no item.
        """
        self._require_recurrent()
        if batch < 1:
            raise ValueError(f"batch={batch}, but it must be at least 1")
        value_dim = self.head_dim if value_dim is None else value_dim
        sizes = Sizes(B=batch, H=self.heads, G=self.kv_heads, N=0, M=0, D=self.head_dim, E=value_dim)
        return self.method.init_state(sizes, like=like, learned=self.learned)

    def step(
        self,
        query: Float[Tensor, "B H N D"],
        key: Float[Tensor, "B G N D"],
        value: Float[Tensor, "B G N E"],
        state: dict[str, Tensor],
        *,
        mask: Mask | None = None,
        scale: float | None = None,
        seed: int | None = None,
    ) -> tuple[Float[Tensor, "B H N E"], dict[str, Tensor]]:
        """Causal attention of N ≥ 1 new tokens to those in the state and to each other: (out, the state with them).

        The outputs are those of one causal call over all tokens so far, and the work does not depend on how many there
        were. The state given is left as it is. Padded tokens (`mask`: padding of the new tokens alone) come out as 0
        and change no state, so that prompts of several lengths are padded on the left. `scale` and `seed` must be the
        same in all steps: a state does not know with which it was filled.

        Raises:
            TypeError: the state is not a dict of tensors.
            ValueError: the method is not recurrent, the mask holds more than padding, or the state is not one of this
                layer, batch, dtype or device; and as `subquad.attention`.
        """
        self._require_recurrent()
        refuse_in_use("a step", "decode on one rank, inside sq.distributed.use(None)")
        check_step_mask(mask)
        mask = (mask or Mask()) & Mask.causal(offset=0)
        query, key, value, call = self.prepare(query, key, value, mask=mask, scale=scale, seed=seed)
        if call.parallel is not None:
            raise ValueError(
                "a step has a state of its own on each rank; leave the block of sq.distributed.use to decode"
            )
        width = value.shape[3]
        if width not in self._shapes:
            fresh = self.init_state(1, like=query, value_dim=width)
            self._shapes[width] = {name: tensor.shape[1:] for name, tensor in fresh.items()}
        heads = f"{self.heads} heads of width {self.head_dim} on {self.kv_heads} key heads, values of width {width}"
        value_dim = None if width == self.head_dim else width
        check_state(state, self._shapes[width], query, heads, self.method.name, value_dim)
        exact = torch.promote_types(query.dtype, torch.float32)
        with without_autocast(query.device.type):
            out, state = self.method.advance(query.to(exact), key.to(exact), value.to(exact), state, call)
        out, valid = out.to(query.dtype), call.mask.query_padding(query.shape[2])
        return (out if valid is None else out.masked_fill(~valid[:, None, :, None], 0.0)), state

    def _require_recurrent(self) -> None:
        if not self.method.traits.recurrent:
            raise ValueError(
                f"{self.method.name!r} keeps no state of a fixed size, so it cannot decode step by step; keep the keys "
                "and values, and call it with Mask.causal(offset=…), or use a method whose trait `recurrent` is true"
            )

    def auxiliary_loss(self) -> Tensor | None:
        """Return and clear the auxiliary loss of the last call in training; None if the method has none."""
        loss, self._loss = self._loss, None
        if loss is not None and has_left_vmap(loss):
            raise ValueError(
                "the auxiliary loss was computed inside torch.func.vmap, which has ended; read it inside of the "
                "function that vmap runs"
            )
        return loss

    def __getstate__(self) -> dict[str, Any]:
        # A copy is a layer that has not run: a loss belongs to a graph, which can be neither copied nor pickled. It is
        # not audited either.
        return {name: each for name, each in self.__dict__.items() if name != "watch"} | {"_loss": None}

    def extra_repr(self) -> str:
        """The text that `print(module)` shows."""
        return str(self.method)


class Bindable:
    """Binding of a method to its learned parameters, if it has any."""

    def bind(
        self,
        *,
        heads: int,
        head_dim: int,
        kv_heads: int | None = None,
        max_length: int | None = None,
        shared: nn.Module | None = None,
        device: torch.device | str | None = None,
    ) -> BoundMethod:
        """Return the module that runs this method for one layer, with learned parameters if the method has any.

        `max_length` and `shared` are for methods whose parameters need a longest length or are shared by layers.
        `device` is where new parameters are; None: torch's default device.

        Raises:
            TypeError: `shared` is not of the type of this method's learned parameters.
            ValueError: the method has none, or they have other shapes; or it needs a longest length.
        """
        kv_heads = kv_heads or heads
        # Parameters that are made in inference mode could never be trained, and a backward pass would leave them out.
        with torch.inference_mode(False), nullcontext() if device is None else torch.device(device):
            learned = self.make_learned(heads, kv_heads, head_dim, max_length)
        sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
        bound = BoundMethod(self, **sizes, learned=learned, max_length=max_length)
        if shared is not None:
            _check_shared(shared, bound)
            bound.learned = shared
        return bound

    def make_learned(self, heads: int, kv_heads: int, head_dim: int, max_length: int | None) -> nn.Module | None:
        """The initial learned parameters of one layer, from the method's seed; None if it has none."""
        return None

    def only_bound(self) -> str:
        """The reason why a method with learned parameters takes no bare call, and where it runs."""
        return only_bound(self)


def _check_shared(shared: nn.Module, bound: BoundMethod) -> None:
    """Check that learned parameters of another layer are such as those that were made for this one."""
    method, needed = bound.method, bound.learned
    remedy = "give other.attention.learned of a layer with the same method, settings and sizes"
    if needed is None:
        raise ValueError(
            f"`shared` is a {type(shared).__name__}, but {method} has no learned parameters; leave `shared` out"
        )
    if type(shared) is not type(needed):
        raise TypeError(
            f"`shared` is a {type(shared).__name__}, but the learned parameters of {method} are a "
            f"{type(needed).__name__}; {remedy}"
        )
    have, want = ({name: tuple(x.shape) for name, x in module.state_dict().items()} for module in (shared, needed))
    for name in want | have:
        if have.get(name) != want.get(name):
            raise ValueError(
                f"`shared` has {name}: {have.get(name, 'none')}, but {method} with {bound.heads} heads of width "
                f"{bound.head_dim} on {bound.kv_heads} key heads has {want.get(name, 'none')}; {remedy}"
            )
