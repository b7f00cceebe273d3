"""The base class of methods: settings, traits, and one checked call."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from subquad.core.shapes import validate
from subquad.kernels.precision import upcast
from subquad.kernels.tokens.packing import take_apart
from subquad.kernels.tokens.padding import cleared_inputs
from subquad.kernels.tokens.rotary import Rotary
from subquad.masks import Mask
from subquad.methods.core.auxiliary_loss import AuxiliaryLoss
from subquad.methods.core.bound_method import Bindable, BoundMethod
from subquad.methods.core.call import Attend, Call, Partial, Prepare, PrepareStep, checked_shard
from subquad.methods.core.checks import (
    as_autocast,
    check_options,
    checked_hidden,
    checked_rotary,
    lacking,
    unsupported,
    without_autocast,
)
from subquad.methods.core.current_shard import in_use
from subquad.methods.core.exact import prepare_exact
from subquad.methods.core.global_tokens import Keep, completed, inputs_of_residual, kept_tokens
from subquad.methods.core.grammar import as_term
from subquad.methods.core.head_subset import Heads
from subquad.methods.core.learned_heads import some_heads
from subquad.methods.core.onnx import OnnxSupport, refusal_in_onnx, refuse_jit_trace
from subquad.methods.core.recurrence import Recurrence
from subquad.methods.core.registry import register
from subquad.methods.core.settings import MOST_REPEATS, WIDEST, Settings, choice, number, whole
from subquad.methods.core.traits import Fit, Traits

__all__ = [
    "METHODS",
    "MOST_REPEATS",
    "WIDEST",
    "BoundMethod",
    "Call",
    "Fit",
    "Method",
    "Part",
    "Partial",
    "Traits",
    "choice",
    "number",
    "upcast",
    "whole",
]

METHODS: dict[str, type[Method]] = {}  # by name, in families; being defined in this folder puts a method here


class Part(NamedTuple):
    """A method, and its share of the heads."""

    method: Method
    share: int


@dataclass(frozen=True)
class Method(Settings, Bindable, AuxiliaryLoss, Recurrence):
    """One attention mechanism: a frozen dataclass of its hyperparameters.

    A subclass gives `name`, `traits`, its settings as fields with defaults (see `methods.core.settings`), and `attend`;
    being defined in this folder puts it among the methods. `traits` are those of the default settings; where settings
    change what the method can do, `describe` returns how.

    A method with learned parameters also gives `make_learned`, and finds them in `call.learned`; it runs only as a
    bound method.
    """

    traits: ClassVar[Traits]
    onnx: ClassVar[OnnxSupport] = "no"  # the calls whose ONNX programs of a dynamic length are right at every length
    following_length: ClassVar[tuple[str, ...]] = ()  # settings whose 0 is replaced by a root of the length
    # The functions that `exact_queries` and `prepare_step` are about: a class that overrides one of them has no exact
    # queries and prepares no step, unless it defines these properties too.
    attends_by: ClassVar[frozenset[str]] = frozenset(
        {"__call__", "prepare", "run", "attend_partial", "attend_for", "attend", "meetings"}
    )

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if vars(cls).keys() & cls.attends_by:
            for name, value in (("exact_queries", 0), ("prepare_step", None)):
                if name not in vars(cls):
                    setattr(cls, name, value)
        if "name" in vars(cls) and cls.__module__.startswith("subquad.methods."):
            assert cls.name not in METHODS, f"there are two methods called {cls.name!r}"
            register(METHODS, cls)

    def __post_init__(self) -> None:
        self.check_fields()
        self.check()
        traits = self.describe()
        if traits is not self.traits:
            object.__setattr__(self, "traits", traits)

    def check(self) -> None:
        """Raise ValueError if settings, each valid by itself, contradict each other."""

    def describe(self) -> Traits:
        """The traits of the method with these settings."""
        return type(self).traits

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Partial:
        """The computation, on inputs that `__call__` has checked: (out, lse), in the inputs' dtype or a wider one.

        Padded queries may come out as anything finite unless the trait `zeroes_padding` is true. lse, (B,H,N) in fp32
        or fp64, is read where `call.wants_lse`; −inf for a query that sees no key.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no attend")

    def attend_for(self, mask: Mask) -> Attend:
        """The function that computes this method's attention under a mask: `attend`, except if causal by halves."""
        return self.attend

    @property
    def exact_queries(self) -> int:
        """The most queries at the end of a causal call for which this method is exact attention; 0: none."""
        return 0

    @property
    def prepare_exact(self) -> Prepare:
        """The function that prepares exact attention, of at most `exact_queries` queries; padded ones are not set to 0.

        Layers of which this is the same share what it makes.
        """
        return prepare_exact

    @property
    def prepare_step(self) -> PrepareStep | None:
        """The function that prepares this method's attention of one query on a cache; None if it has none.

        Layers of which this is equal share what it makes.
        """
        return None

    def sdpa_instead(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> str | None:
        """The reason why SDPA computes a prepared call in place of this method's own code; None if it does not."""
        return None

    def __call__(
        self,
        query: Float[Tensor, "B H N D"],
        key: Float[Tensor, "B G M D"],
        value: Float[Tensor, "B G M E"],
        **options: Any,
    ) -> Any:
        """Attention by this method; arguments, shapes and errors as in `subquad.attention`."""
        options["parallel"] = in_use(options.get("parallel"))
        if options["parallel"] is not None and torch.compiler.is_compiling():  # see `BoundMethod.forward`
            return torch.compiler.disable(self.__call__)(query, key, value, **options)
        return self.run(*self.prepare(query, key, value, **options))

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
        return_lse: bool = False,
        keep: Keep | None = None,
        parallel: object = None,
        rotary: Rotary | None = None,
        learned: nn.Module | None = None,
        hidden: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Call]:
        """Check the arguments of a call, and return the arguments of `run`. Errors as in `subquad.attention`.

        `hidden`, the layer's input at the queries, (B,N,width), is read by methods with the trait `needs_hidden` alone.
        """
        if learned is None and self.traits.learned:
            raise ValueError(self.only_bound())
        refuse_jit_trace(self)
        query, key, value = as_autocast(query), as_autocast(key), as_autocast(value)
        sizes = validate(query, key, value, enable_gqa)
        seed = self.default_seed if seed is None else seed
        check_options(query, key, mask, bias if parallel is None else None, scale, dropout_p, seed)
        mask = mask or Mask()
        mask = mask & Mask.causal(offset=0) if is_causal else mask
        shard = checked_shard(parallel)
        if shard is None:
            mask.check(sizes, query.device)
        else:
            mask, sizes = shard.mask_of_rank(mask, sizes, query.device)
        self.check_counts(sizes.N, sizes.M)
        kept: Any = None
        if keep is not None:
            kept = kept_tokens(keep, query, key, mask) if shard is None else shard.kept_of_rank(keep, query, mask)
        asked = {"bias": bias is not None, "cross": sizes.N != sizes.M, "lse": return_lse, "keep": keep is not None}
        reason = self.refuses(mask, **asked) or refusal_in_onnx(self, query, key, mask)
        if reason:
            raise ValueError(reason)
        if self.is_exact and mask.span is None:
            kept = None
        scale = sizes.D**-0.5 if scale is None else scale
        hidden = checked_hidden(self, query, hidden, mask) if self.traits.needs_hidden else None
        rotary = checked_rotary(rotary, query, mask)
        call = Call(mask, bias, scale, dropout_p, seed, learned, return_lse, hidden, kept, rotary=rotary)
        if shard is not None:
            shard.check(self, query, key, value, call)
            call = replace(call, parallel=shard)
        if kept is not None or not self.traits.skips_padding:
            query, key, value = cleared_inputs(query, key, value, mask)
        return query, key, value, call

    def run(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Any:
        """Attention on inputs from `prepare`: out, or (out, lse) if the call wants both."""
        with without_autocast(query.device.type):
            if call.parallel is not None:
                out, lse = call.parallel.run(self, query, key, value, call)
            else:
                out, lse = self.attend_partial(query, key, value, call)
        return (out.to(query.dtype), lse) if call.wants_lse else out.to(query.dtype)

    def attend_partial(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Partial:
        """(out, lse) of prepared inputs, as `attend` returns them, to compose attention from several parts.

        Kept tokens have their exact rows and columns, and packed segments are taken one by one if the method takes
        none. Padded queries are 0, with lse = −inf. lse is None unless `call.wants_lse`; out is not cast.
        """
        if call.kept is not None:
            prepared = inputs_of_residual(query, key, value, call, skips_padding=self.traits.skips_padding)
            return completed(query, key, value, call, self.attend_partial(*prepared))
        mask = call.mask
        # With an item, there are more tokens than these.
        attend = (self if call.item is not None else self.clamped_to(query.shape[2], key.shape[2])).attend_for(mask)
        if mask.ids and not self.traits.takes_segments:
            (query, key, value, *hidden), inner, together = take_apart((query, key, value, *call.hidden_as_head), mask)
            inside = replace(call.under(inner), hidden=hidden[0][:, 0] if hidden else None)
            out, lse = attend(query, key, value, inside)
            out, lse = together(out), together(lse) if call.wants_lse and lse is not None else None
        else:
            out, lse = attend(query, key, value, call)
        return self.without_padding((out, lse), call)

    def without_padding(self, partial: Partial, call: Call) -> Partial:
        """A partial of `attend` with padded queries set to 0 and lse = −inf; without lse if the call needs none."""
        out, lse = partial
        valid = call.mask.query_padding(out.shape[2])
        if valid is not None and not self.traits.zeroes_padding:
            out = out.masked_fill(~valid[:, None, :, None], 0.0)
        if not call.wants_lse:
            return out, None
        assert lse is not None, f"{self.name!r} gives no log-sum-exp, which its traits promise"
        return out, lse if valid is None else lse.masked_fill(~valid[:, None], -torch.inf)

    @property
    def is_exact(self) -> bool:
        """True if this is exact attention, whatever its settings."""
        return self.traits.exact_limit == {}

    @property
    def parts(self) -> tuple[Part, ...]:
        """The methods among which the heads are divided: only this one, except for mixed heads."""
        return (Part(self, 1),)

    def deal(self, heads: int, kv_heads: int) -> list[tuple[slice, slice]]:
        """Assign query heads and key heads to each part."""
        return [(slice(0, heads), slice(0, kv_heads))]

    def refuses(
        self, mask: Mask, *, bias: bool = False, cross: bool = False, lse: bool = False, keep: bool = False
    ) -> str | None:
        """The reason why this method cannot take a call, in one line with the remedy; None if it can."""
        lacks = lacking(self.traits, mask, bias=bias, cross=cross, lse=lse, keep=keep)
        return unsupported(self.label, lacks) if lacks else None

    def of_heads(self, learned: nn.Module, heads: Heads) -> nn.Module:
        """The learned parameters of some of the heads, with gradients to those of all."""
        return some_heads(learned, heads)

    def __add__(self, other: Method) -> Method:
        """The sum of two methods, in which each key counts once: see `sq.Sum`."""
        if not isinstance(other, Method):
            return NotImplemented
        return METHODS["sum"].from_settings({"terms": f"{as_term(self)}+{as_term(other)}"})
