"""What every method is: settings as plain data, traits beside them, one checked call."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from subquad.masks import Mask
from subquad.methods.checks import as_autocast, check_options, check_state, check_step_mask
from subquad.methods.traits import Call, Fit, Traits
from subquad.ops.packing import per_segment, take_apart
from subquad.ops.padding import cleared_inputs
from subquad.shapes import Sizes, validate
from subquad.spelling import nearest

__all__ = ["Bound", "Call", "Fit", "Method", "Traits", "by_item", "constants", "nearest"]


FEW = 1024  # a setting up to this costs little, however few tokens there are
MOST_REPEATS = 1000  # of rounds and iterations
WIDEST = 2**16  # of learned layers and feature maps


@dataclass(frozen=True)
class Method:
    """One attention mechanism: a frozen dataclass that holds its hyper-parameters and nothing else.

    A subclass gives `name`, `traits`, its settings as fields with defaults, and `attend`. Where a setting changes what
    the method can do, the object has traits of its own; those of the class are the defaults'. A setting with a fixed
    choice of words lists them as `metadata={"choices": …}`, one of free text gives `metadata={"examples": …}`.

    A method with learned parameters also gives `make_learned`, and finds them in `call.learned`; it exists only bound.
    """

    name: ClassVar[str]
    traits: ClassVar[Traits]
    fit: ClassVar[Fit | None] = None  # how its learned parameters are fitted to a frozen model, if they can be
    one_for_all_layers: ClassVar[bool] = False  # whether the layers of a model share its learned parameters
    clamped: ClassVar[tuple[str, ...]] = ()  # settings for which more than there are tokens means as many
    counts: ClassVar[tuple[str, ...]] = ()  # settings that say into how many parts the tokens go
    zeroes_padding: ClassVar[bool] = False  # whether `attend` gives 0 for padded queries: else the caller sees to it
    skips_padding: ClassVar[bool] = False  # whether `attend` takes NaN in padding: else the caller clears it

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor:
        """The computation, on inputs that `__call__` has checked. Padded queries may come out as anything finite
        unless the class says `zeroes_padding`.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no attend")

    def __call__(
        self,
        query: Float[Tensor, "B H N D"],
        key: Float[Tensor, "B G M D"],
        value: Float[Tensor, "B G M E"],
        *,
        mask: Mask | None = None,
        is_causal: bool = False,
        bias: Float[Tensor, "#B #H N M"] | None = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        dropout_p: float = 0.0,
        seed: int | None = None,
    ) -> Float[Tensor, "B H N E"]:
        """Attention by this method; arguments, shapes and errors as in `subquad.attention`."""
        if self.traits.learned:
            raise ValueError(
                f"{self.name!r} has learned parameters, so it exists only bound to a layer: in "
                "sq.nn.MultiheadAttention, by sq.hf.swap, or by method.bind(heads=…, head_dim=…)"
            )
        return self.run(
            *self.prepare(
                query,
                key,
                value,
                mask=mask,
                is_causal=is_causal,
                bias=bias,
                scale=scale,
                enable_gqa=enable_gqa,
                dropout_p=dropout_p,
                seed=seed,
            )
        )

    def prepare(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: Mask | None = None,
        is_causal: bool = False,
        bias: Tensor | None = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        dropout_p: float = 0.0,
        seed: int | None = None,
        learned: nn.Module | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Call]:
        """Check what is asked for, and return what `run` takes. Errors as in `subquad.attention`."""
        query, key, value = as_autocast(query), as_autocast(key), as_autocast(value)
        sizes = validate(query, key, value, enable_gqa)
        seed = self.default_seed if seed is None else seed
        check_options(query, key, mask, bias, scale, dropout_p, seed)
        mask = mask or Mask()
        mask = mask & Mask.causal(offset=0) if is_causal else mask
        mask.check(sizes, query.device)
        self._check_counts(sizes.N, sizes.M)
        reason = self.refuses(mask, bias=bias is not None, gqa=sizes.H != sizes.G, cross=sizes.N != sizes.M)
        if reason:
            raise ValueError(reason)
        call = Call(
            mask=mask,
            bias=bias,
            scale=sizes.D**-0.5 if scale is None else scale,
            dropout_p=dropout_p,
            seed=seed,
            learned=learned,
        )
        if not self.skips_padding:
            query, key, value = cleared_inputs(query, key, value, mask)
        return query, key, value, call

    def run(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor:
        """Attention on what `prepare` has checked."""
        with torch.autocast(query.device.type, enabled=False):
            out = self._for_tokens(query.shape[2], key.shape[2]).attend(query, key, value, call)
        real = call.mask.query_padding(query.shape[2])
        return out if real is None or self.zeroes_padding else out.masked_fill(~real[:, None, :, None], 0.0)

    @property
    def default_seed(self) -> int:
        """The seed of a call that names none: the field `seed`, where the method has one."""
        return getattr(self, "seed", 0)

    def refuses(self, mask: Mask, *, bias: bool = False, gqa: bool = False, cross: bool = False) -> str | None:
        """Why this method cannot take such a call, in one line with the remedy; None where it can."""
        t = self.traits
        on_keys = t.cross or (t.cached and mask.offset is not None)
        checks = {
            "a causal mask": mask.is_causal and t.causal == "no",
            "fewer or more keys than queries (cross-attention, or a step on a cache)": cross and not on_keys,
            "padding": bool(mask.both or mask.keys or mask.queries) and not t.key_padding,
            "segments": bool(mask.ids) and not t.segments,
            "a window": mask.span is not None and not t.window,
            "a dense mask": bool(mask.allowed) and not t.dense_mask,
            "an additive bias": bias and not t.bias,
            "grouped-query heads": gqa and not t.gqa,
        }
        lacks = [what for what, refused in checks.items() if refused]
        if not lacks:
            return None
        why = f": {_CAUSAL_REASON}" if lacks[0] == "a causal mask" else ""
        causal = ", or a causal one such as 'local' or 'learned-feature-map'" if lacks == ["a causal mask"] else ""
        return f"{self.name!r} does not support {' or '.join(lacks)}{why}; use method='full' here{causal}"

    def bind(
        self,
        *,
        heads: int,
        head_dim: int,
        kv_heads: int | None = None,
        max_length: int | None = None,
        shared: nn.Module | None = None,
    ) -> Bound:
        """The module that runs this method for one layer; a method with learned parameters makes them here.

        `max_length` and `shared` are for methods whose parameters need a longest length or are shared by layers.
        """
        kv_heads = kv_heads or heads
        learned = shared if shared is not None else self.make_learned(heads, kv_heads, head_dim, max_length)
        return Bound(self, heads=heads, kv_heads=kv_heads, head_dim=head_dim, learned=learned, max_length=max_length)

    def make_learned(self, heads: int, kv_heads: int, head_dim: int, max_length: int | None) -> nn.Module | None:
        """The learned parameters of one layer as they start, drawn from the method's seed; None where it has none."""
        return None

    def auxiliary_loss(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor | None:
        """A loss for parameters that the output has no gradient to; None where there are none.

        Its gradient to query, key and value is exactly 0, and the output's gradient to those parameters is exactly 0.
        """
        return None

    def fit_loss(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor | None:
        """What `subquad calibrate` minimises; its gradient to query, key and value is exactly 0. None: nothing to fit.

        The auxiliary loss, unless the method's file has its own, such as `methods.fitting.output_error`.
        """
        return self.auxiliary_loss(query, key, value, call)

    def init_state(self, sizes: Sizes, *, like: Tensor, learned: nn.Module | None = None) -> dict[str, Tensor]:
        """The state before the first token, for a method whose trait `recurrent` says that it has one: no N, no M.

        Each tensor's first axis is the batch; floating ones are in fp32, or better where `like` is, on its device.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no init_state")

    def advance(
        self, query: Tensor, key: Tensor, value: Tensor, state: dict[str, Tensor], call: Call
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The outputs of N ≥ 1 new tokens that follow those in the state, and the state with them.

        Inputs are checked and in the state's dtype. `call.mask` is causal among the new tokens and may hold padding,
        such as that on the left of a first prompt: padded tokens change no state. The state given is left as it is,
        and the one returned has the same shapes.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no advance")

    def to_dict(self) -> dict[str, Any]:
        """Name and settings as plain data: `{"name": "clustered", "clusters": 100, …}`."""
        return {"name": self.name, **asdict(self)}

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Method:
        """Build from settings; those left out keep their defaults. ValueError names an unknown one and the nearest."""
        known = list(cls.defaults())
        for setting in settings:
            if setting not in known:
                have = f"it has {', '.join(known)}" if known else "it has none"
                raise ValueError(f"{cls.name!r} has no setting {setting!r}{nearest(setting, known)}; {have}")
        return cls(**settings)

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """The settings and their defaults."""
        # Not `dataclasses.fields`, which torch.compile cannot trace on a class: it would refuse methods given as text.
        settings: tuple[str, ...] = cls.__match_args__
        return {setting: getattr(cls, setting) for setting in settings}

    def __str__(self) -> str:
        """As the command line writes it, with the settings that differ from the defaults."""
        changed = [f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != f.default]
        return f"{self.name}:{','.join(changed)}" if changed else self.name

    def _check_counts(self, N: int, M: int) -> None:
        """Raise ValueError where tokens were to go into far more parts than there are tokens, and take for ever."""
        for setting in self.counts:
            have = getattr(self, setting)
            # A small setting is not compared with a length, which is symbolic while a compiler traces.
            if have > FEW and have > max(N, M):
                raise ValueError(
                    f"{self.name!r}: {setting}={have} for {int(max(N, M))} tokens, but it must be at most "
                    f"{max(FEW, int(N), int(M))} there"
                )

    def _for_tokens(self, N: int, M: int) -> Method:
        """This method for so many tokens: a setting that means the same beyond them is brought down to them."""
        beyond = [s for s in self.clamped if getattr(self, s) > FEW and getattr(self, s) > max(N, M)]
        return replace(self, **{setting: int(max(N, M)) for setting in beyond}) if beyond else self

    def _require_at_most(self, most: int, *settings: str) -> None:
        """Check that settings that size parameters, or say how often work is repeated, are within reason."""
        for setting in settings:
            have = getattr(self, setting)
            if have > most:
                raise ValueError(f"{self.name!r}: {setting}={have}, but it must be at most {most}")

    def _require(self, **least: int) -> None:
        """Check that whole-number settings are at least so much."""
        for setting, minimum in least.items():
            have = getattr(self, setting)
            if not isinstance(have, int) or isinstance(have, bool) or have < minimum:
                raise ValueError(f"{self.name!r}: {setting}={have!r}, but it must be a whole number ≥ {minimum}")

    def _require_number(self, **least: float) -> None:
        """Check that settings are numbers of at least so much."""
        for setting, minimum in least.items():
            have = getattr(self, setting)
            number = isinstance(have, int | float) and not isinstance(have, bool)
            if not number or not math.isfinite(have) or have < minimum:
                raise ValueError(f"{self.name!r}: {setting}={have!r}, but it must be a number ≥ {minimum:g}")

    def _check_choices(self) -> None:
        """Check the settings that are one word of a fixed choice."""
        for setting in fields(self):
            have, choices = getattr(self, setting.name), setting.metadata.get("choices")
            if choices is not None and (have not in choices or isinstance(have, bool)):
                listed = ", ".join(map(repr, choices))
                raise ValueError(f"{self.name!r}: {setting.name}={have!r}, but it must be one of {listed}")


def by_item(
    attend: Callable[[Tensor, Tensor, Tensor, Call], Tensor], query: Tensor, key: Tensor, value: Tensor, call: Call
) -> Tensor:
    """Run `attend` in fp32 or better, and packed segments as if each were a batch item; the dtype in is that out."""
    dtype = query.dtype
    query, key, value = (x.to(torch.promote_types(dtype, torch.float32)) for x in (query, key, value))
    if not call.mask.ids:
        return attend(query, key, value, call).to(dtype)
    out = per_segment(lambda q, k, v, mask: attend(q, k, v, call.under(mask)), query, key, value, call.mask)
    return out.to(dtype)


def constants(query: Tensor, key: Tensor, call: Call) -> tuple[Tensor, Tensor, Call]:
    """What an auxiliary loss reads: query and key in fp32 or better, without gradient, one batch item a segment."""
    exact = torch.promote_types(query.dtype, torch.float32)
    query, key = query.detach().to(exact), key.detach().to(exact)
    if call.mask.ids:
        (query, key), mask, _ = take_apart((query, key), call.mask)
        call = call.under(mask)
    return query, key, call


_CAUSAL_REASON = "its output at one position depends on later positions, so the future would leak"


class Bound(nn.Module):
    """A method attached to one layer. Calls like the method; remembers the head counts it was made for."""

    def __init__(
        self,
        method: Method,
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

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """As `subquad.attention`, less `method`. In training it keeps the auxiliary loss of this call."""
        query, key, value, call = self.prepare(query, key, value, **options)
        if self.learned is not None and self.training and torch.is_grad_enabled():
            with torch.autocast(query.device.type, enabled=False):
                self._loss = self.method.auxiliary_loss(query, key, value, call)
        return self.method.run(query, key, value, call)

    def prepare(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor, Call]:
        """As `Method.prepare`, with the learned parameters in the call."""
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
            TypeError: the state is no dict of tensors.
            ValueError: the method is not recurrent, the mask holds more than padding, or the state is not one of this
                layer, batch, dtype or device; and as `subquad.attention`.
        """
        self._require_recurrent()
        check_step_mask(mask)
        mask = (mask or Mask()) & Mask.causal(offset=0)
        query, key, value, call = self.prepare(query, key, value, mask=mask, scale=scale, seed=seed)
        width = value.shape[3]
        if width not in self._shapes:
            fresh = self.init_state(1, like=query, value_dim=width)
            self._shapes[width] = {name: tensor.shape[1:] for name, tensor in fresh.items()}
        heads = f"{self.heads} heads of width {self.head_dim} on {self.kv_heads} key heads, values of width {width}"
        value_dim = None if width == self.head_dim else width
        check_state(state, self._shapes[width], query, heads, self.method.name, value_dim)
        exact = torch.promote_types(query.dtype, torch.float32)
        with torch.autocast(query.device.type, enabled=False):
            out, state = self.method.advance(query.to(exact), key.to(exact), value.to(exact), state, call)
        out, real = out.to(query.dtype), call.mask.query_padding(query.shape[2])
        return (out if real is None else out.masked_fill(~real[:, None, :, None], 0.0)), state

    def _require_recurrent(self) -> None:
        if not self.method.traits.recurrent:
            raise ValueError(
                f"{self.method.name!r} keeps no state of a fixed size, so it cannot decode step by step; keep the keys "
                "and values, and call it with Mask.causal(offset=…), or use a method whose trait `recurrent` is true"
            )

    def auxiliary_loss(self) -> Tensor | None:
        """The auxiliary loss of the last call in training, and forget it; None where the method has none."""
        loss, self._loss = self._loss, None
        return loss

    def __getstate__(self) -> dict[str, Any]:
        # A copy is a layer that has not run: a loss belongs to a graph, which can be neither copied nor pickled.
        return {**self.__dict__, "_loss": None}

    def extra_repr(self) -> str:
        """What `print(module)` shows."""
        return str(self.method)
