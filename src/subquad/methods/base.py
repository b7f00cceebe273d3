"""The base class of methods: settings as plain data, traits, and one checked call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, asdict, dataclass, fields, replace
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from subquad.masks import Mask
from subquad.methods import settings
from subquad.methods.bound_method import BoundMethod
from subquad.methods.call import Call, Partial
from subquad.methods.checks import as_autocast, check_options, checked_hidden, only_bound, without_autocast
from subquad.methods.grammar import as_term
from subquad.methods.in_parallel import check_parallel, kept_of_rank, loss_of_rank, mask_of_rank, run_parallel
from subquad.methods.keep import Keep, completed, inputs_of_rest, kept_tokens
from subquad.methods.learned_heads import some_heads
from subquad.methods.settings import FEW, MOST_REPEATS, WIDEST, choice, number, whole
from subquad.methods.traits import FAMILIES, Fit, Traits
from subquad.ops.packing import take_apart
from subquad.ops.padding import cleared_inputs
from subquad.ops.precision import wide
from subquad.parallel.current import in_use, running_split
from subquad.parallel.heads import Heads
from subquad.shapes import Sizes, validate
from subquad.spelling import instead

__all__ = [
    "METHODS",
    "MOST_REPEATS",
    "WIDEST",
    "Bound",
    "BoundMethod",
    "Call",
    "Fit",
    "Method",
    "Part",
    "Partial",
    "Traits",
    "choice",
    "number",
    "whole",
    "wide",
]

Bound = BoundMethod  # its name in earlier versions, and in what they pickled
METHODS: dict[str, type[Method]] = {}  # by name, in families; being defined in this folder puts a method here


class Part(NamedTuple):
    """A method, and its share of the heads."""

    method: Method
    share: int


@dataclass(frozen=True)
class Method:
    """One attention mechanism: a frozen dataclass that holds its hyper-parameters and nothing else.

    A subclass gives `name`, `traits`, its settings as fields with defaults (see `methods.settings`), and `attend`;
    being defined in this folder puts it among the methods. `traits` are those of the default settings; where settings
    change what the method can do, `describe` says how.

    A method with learned parameters also gives `make_learned`, and finds them in `call.learned`; it runs only as a
    bound method.
    """

    name: ClassVar[str]
    traits: ClassVar[Traits]
    zeroes_padding: ClassVar[bool] = False  # whether `attend` gives 0 for padded queries: else the caller sees to it
    skips_padding: ClassVar[bool] = False  # whether `attend` takes NaN in padding: else the caller clears it
    takes_segments: ClassVar[bool] = False  # whether `attend` reads packed segments: else each comes as a batch item
    clamped: ClassVar[tuple[str, ...]] = ()  # settings for which more than there are tokens means as many
    counts: ClassVar[tuple[str, ...]] = ()  # settings that say into how many parts the tokens go
    split: ClassVar[str | None] = None  # how ranks sum up their keys: "partials", "halo", "places" (`split_by`)
    split_needs: ClassVar[str] = ""  # what settings must be for that, where it depends on them
    rings: ClassVar[bool] = False  # whether `attend` can pass keys from rank to rank, as exact attention does
    loss_reads_tokens: ClassVar[bool] = True  # whether the auxiliary loss, if there is one, depends on the inputs
    former: ClassVar[dict[str, str]] = {}  # settings by the names that they had in earlier versions
    units: ClassVar[tuple[str, ...]] = ()  # settings that mean 1 where a text gives them without a value
    of_texts: ClassVar[bool] = False  # whether its one setting is a text of other methods

    def __init_subclass__(cls) -> None:
        rules = {name: field.metadata for name, field in vars(cls).items() if isinstance(field, Field)}
        cls.clamped += tuple(name for name, rule in rules.items() if rule.get("clamped"))
        cls.counts += tuple(name for name, rule in rules.items() if rule.get("counts"))
        cls.former = cls.former | {rule["former"]: name for name, rule in rules.items() if rule.get("former")}
        if "name" in vars(cls) and cls.__module__.startswith("subquad.methods."):
            _register(cls)

    def __new__(cls, *values: Any, **given: Any) -> Any:
        """Raise TypeError for an unknown setting, with the nearest known one, before the dataclass does without."""
        for name in given:
            if name not in cls.__match_args__:
                raise TypeError(cls.unknown(name))
        return super().__new__(cls)

    def __post_init__(self) -> None:
        settings.check(self)
        self.check()
        traits = self.describe()
        if traits is not self.traits:
            object.__setattr__(self, "traits", traits)

    def check(self) -> None:
        """Raise ValueError if settings, each valid by itself, contradict each other."""

    def describe(self) -> Traits:
        """The traits of the method with these settings."""
        return type(self).traits

    def split_by(self) -> str | None:
        """How ranks sum up their keys with these settings; None: they cannot.

        "partials": in `attend`. "halo": by the keys as far away as `reach` says; distances alone decide. "places": the
        same where it matters where a token stands in its item, and with tokens that are `seen_by_all`.
        """
        return self.split

    def can_ring(self) -> bool:
        """Whether, with these settings, keys can go from rank to rank."""
        return self.rings

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Partial:
        """The computation, on inputs that `__call__` has checked: (out, lse), in the inputs' dtype or a wider one.

        Padded queries may come out as anything finite unless the class says `zeroes_padding`. lse, (B,H,N) in fp32 or
        fp64, is read where `call.wants_lse`; −inf for a query that sees no key.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no attend")

    def __call__(
        self,
        query: Float[Tensor, "B H N D"],
        key: Float[Tensor, "B G M D"],
        value: Float[Tensor, "B G M E"],
        **how: Any,
    ) -> Any:
        """Attention by this method; arguments, shapes and errors as in `subquad.attention`."""
        if self.traits.learned:
            raise ValueError(only_bound(self))
        how["parallel"] = in_use(how.get("parallel"))
        return self.run(*self.prepare(query, key, value, **how))

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
        parallel: Any = None,
        learned: nn.Module | None = None,
        hidden: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Call]:
        """Check the arguments of a call, and return the arguments of `run`. Errors as in `subquad.attention`.

        `hidden`, the layer's input at the queries, (B,N,width), is read by methods with the trait `needs_hidden` alone.
        """
        query, key, value = as_autocast(query), as_autocast(key), as_autocast(value)
        sizes = validate(query, key, value, enable_gqa)
        seed = self.default_seed if seed is None else seed
        check_options(query, key, mask, bias if parallel is None else None, scale, dropout_p, seed)
        mask = mask or Mask()
        mask = mask & Mask.causal(offset=0) if is_causal else mask
        if parallel is None:
            mask.check(sizes, query.device)
        else:
            mask, sizes = mask_of_rank(mask, sizes, parallel, query.device)
        self.check_counts(sizes.N, sizes.M)
        kept: Any = None
        if keep is not None:
            kept = kept_tokens(keep, query, key, mask) if parallel is None else kept_of_rank(keep, query, parallel)
        asked = {"bias": bias is not None, "cross": sizes.N != sizes.M, "lse": return_lse, "keep": keep is not None}
        reason = self.refuses(mask, **asked)
        if reason:
            raise ValueError(reason)
        if self.is_exact and mask.span is None:
            kept = None
        scale = sizes.D**-0.5 if scale is None else scale
        hidden = checked_hidden(self, query, hidden, mask) if self.traits.needs_hidden else None
        call = Call(mask, bias, scale, dropout_p, seed, learned, return_lse, hidden, kept)
        if parallel is not None:
            check_parallel(self, query, key, value, call, parallel)
            call = replace(call, parallel=parallel)
        if kept is not None or not self.skips_padding:
            query, key, value = cleared_inputs(query, key, value, mask)
        return query, key, value, call

    def run(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Any:
        """Attention on inputs from `prepare`: out, or (out, lse) if the call wants both."""
        with without_autocast(query.device.type):
            if call.parallel is not None:
                with running_split():
                    out, lse = run_parallel(self, query, key, value, call)
            else:
                out, lse = self._with_kept(query, key, value, call)
        return (out.to(query.dtype), lse) if call.wants_lse else out.to(query.dtype)

    def _with_kept(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Partial:
        """What `attend` gives, with the rows and columns of kept tokens."""
        if call.kept is None:
            return self._attended(query, key, value, call)
        rest = inputs_of_rest(query, key, value, call, skips_padding=self.skips_padding)
        return completed(query, key, value, call, self._attended(*rest))

    def _attended(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Partial:
        """What `attend` gives, segment by segment where it takes none; padded queries are 0, with lse = −inf."""
        (_, _, N, _), M, mask = query.shape, key.shape[2], call.mask
        sizes = (N, M) if call.parallel is None else call.parallel.sizes
        method = self.clamped_to(*sizes) if call.item is None else self  # else there are more tokens than these
        if mask.ids and not self.takes_segments:
            (query, key, value, *hidden), inner, together = take_apart((query, key, value, *call.hidden_as_head), mask)
            call = replace(call.under(inner), hidden=hidden[0][:, 0] if hidden else None)
            out, lse = method.attend(query, key, value, call)
            out, lse = together(out), together(lse) if call.wants_lse and lse is not None else None
        else:
            out, lse = method.attend(query, key, value, call)
        real = mask.query_padding(N)
        if real is not None and not self.zeroes_padding:
            out = out.masked_fill(~real[:, None, :, None], 0.0)
        if not call.wants_lse:
            return out, None
        assert lse is not None, f"{self.name!r} gives no log-sum-exp, which its traits promise"
        return out, lse if real is None else lse.masked_fill(~real[:, None], -torch.inf)

    @property
    def label(self) -> str:
        """The method in refusals: its name, or what else tells it from the method that refuses nothing."""
        return self.name

    @property
    def default_seed(self) -> int:
        """The seed of a call without a seed: the field `seed`, if the method has one."""
        return getattr(self, "seed", 0)

    @property
    def is_exact(self) -> bool:
        """Whether this is exact attention, whatever its settings."""
        return self.traits.exact_limit == {}

    @property
    def parts(self) -> tuple[Part, ...]:
        """The methods among which the heads are divided: only this one, except for mixed heads."""
        return (Part(self, 1),)

    def deal(self, heads: int, kv_heads: int) -> list[tuple[slice, slice]]:
        """The query heads and the key heads of each part."""
        return [(slice(0, heads), slice(0, kv_heads))]

    def refuses(
        self, mask: Mask, *, bias: bool = False, cross: bool = False, lse: bool = False, keep: bool = False
    ) -> str | None:
        """The reason why this method cannot take a call, in one line with the remedy; None if it can."""
        t = self.traits
        on_keys = t.cross or (t.cached and mask.offset is not None)
        checks = {
            "a causal mask": mask.is_causal and t.causal == "no",
            "fewer or more keys than queries (cross-attention, or a step on a cache)": cross and not on_keys,
            "a window": mask.span is not None and not t.window,
            "a dense mask": bool(mask.allowed) and not t.dense_mask,
            "an additive bias": bias and not t.bias,
            "return_lse=True": lse and not t.lse,
            "`keep`, which needs its log-sum-exp": keep and not t.lse,
        }
        lacks = [what for what, refused in checks.items() if refused]
        if not lacks:
            return None
        why = f": {_CAUSAL_REASON}" if lacks[0] == "a causal mask" else ""
        causal = ", or a causal one such as 'local' or 'learned-feature-map'" if lacks == ["a causal mask"] else ""
        return f"{self.label!r} does not support {' or '.join(lacks)}{why}; use method='full' here{causal}"

    def bind(
        self,
        *,
        heads: int,
        head_dim: int,
        kv_heads: int | None = None,
        max_length: int | None = None,
        shared: nn.Module | None = None,
    ) -> BoundMethod:
        """Return the module that runs this method for one layer, with learned parameters if the method has any.

        `max_length` and `shared` are for methods whose parameters need a longest length or are shared by layers.
        """
        kv_heads = kv_heads or heads
        learned = shared if shared is not None else self.make_learned(heads, kv_heads, head_dim, max_length)
        sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
        return BoundMethod(self, **sizes, learned=learned, max_length=max_length)

    def make_learned(self, heads: int, kv_heads: int, head_dim: int, max_length: int | None) -> nn.Module | None:
        """The initial learned parameters of one layer, from the method's seed; None if it has none."""
        return None

    def auxiliary_loss(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor | None:
        """A loss for parameters without a gradient from the output, or a price of their size; None if there is none.

        Inputs are constants in fp32 or fp64, one batch item a segment: see `run_auxiliary_loss`. The output's gradient
        to parameters of the first kind is exactly 0.
        """
        return None

    def loss_of_heads(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor | None:
        """The share of the heads of this call in the auxiliary loss, which is a mean over heads."""
        loss = self.auxiliary_loss(query, key, value, call)
        return loss if loss is None or call.heads is None else loss * (call.heads.count / call.heads.total)

    def of_heads(self, learned: nn.Module, heads: Heads) -> nn.Module:
        """The learned parameters of some of the heads, with gradients to those of all."""
        return some_heads(learned, heads)

    @property
    def has_auxiliary_loss(self) -> bool:
        """Whether the method, or one of its parts, has an auxiliary loss."""
        return any(type(part.method).auxiliary_loss is not Method.auxiliary_loss for part in self.parts)

    def run_auxiliary_loss(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor | None:
        """The auxiliary loss on inputs from `prepare`. Its gradient to query, key and value is exactly 0."""
        if not self.has_auxiliary_loss:
            return None
        with without_autocast(query.device.type):
            if call.parallel is not None:
                return loss_of_rank(self, query, key, value, call)
            (query, key, value), mask = wide(query.detach(), key.detach(), value.detach()), call.mask
            if call.kept is not None:  # the method does not see them
                mask, call = call.kept.left_out_of(mask, query.shape[2]), replace(call, kept=None)
            if mask.ids:
                (query, key, value), mask, _ = take_apart((query, key, value), mask)
            return self.loss_of_heads(query, key, value, call.under(mask))

    def fit_loss(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor | None:
        """The loss that `subquad calibrate` minimises, without gradient to query, key and value; None: nothing to fit.

        The auxiliary loss, unless the method's file has its own, such as `methods.fitting.output_error`.
        """
        return self.run_auxiliary_loss(query, key, value, call)

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
    def from_settings(cls, given: Mapping[str, Any]) -> Method:
        """Build a method from some settings. ValueError names an unknown setting and the nearest known one."""
        known, now = list(cls.defaults()), {}
        for setting, value in given.items():
            name = cls.former.get(setting, setting)
            if name not in known:
                raise ValueError(cls.unknown(setting))
            if name in now:
                raise ValueError(f"{cls.name!r}: {setting} is the former name of {name}, and both are given")
            now[name] = value
        return cls(**now)

    @classmethod
    def unknown(cls, setting: str) -> str:
        """What to say of a setting that the method does not have."""
        rest = instead(setting, cls.__match_args__, f"`subquad methods {cls.name}` lists", "it has")
        return f"{cls.name!r} has no setting {setting!r}{rest}"

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """The settings and their defaults."""
        # Not `dataclasses.fields`, which torch.compile cannot trace on a class: it would refuse methods given as text.
        names: tuple[str, ...] = cls.__match_args__
        return {name: getattr(cls, name) for name in names}

    def __str__(self) -> str:
        """The method as on the command line, with the settings that differ from the defaults."""
        changed = [f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != f.default]
        return f"{self.name}:{','.join(changed)}" if changed else self.name

    def __add__(self, other: Method) -> Method:
        """The sum of two methods, in which each key counts once: see `sq.Sum`."""
        if not isinstance(other, Method):
            return NotImplemented
        return METHODS["sum"].from_settings({"terms": f"{as_term(self)}+{as_term(other)}"})

    def check_counts(self, N: int, M: int) -> None:
        """Raise ValueError if tokens would be divided into far more parts than there are tokens."""
        for setting in self.counts:
            have = getattr(self, setting)
            # A small setting is not compared with a length, which is symbolic while a compiler traces.
            if have > FEW and have > max(N, M):
                raise ValueError(
                    f"{self.name!r}: {setting}={have} for {int(max(N, M))} tokens, but it must be at most "
                    f"{max(FEW, int(N), int(M))} there"
                )

    def clamped_to(self, N: int, M: int) -> Method:
        """Return the method for N queries and M keys, with settings that exceed these numbers reduced to them."""
        beyond = [s for s in self.clamped if getattr(self, s) > FEW and getattr(self, s) > max(N, M)]
        return replace(self, **{setting: int(max(N, M)) for setting in beyond}) if beyond else self


_CAUSAL_REASON = "its output at one position depends on later positions, so the future would leak"


def _register(cls: type[Method]) -> None:
    """Put a method among the others."""
    assert cls.name not in METHODS, f"there are two methods called {cls.name!r}"
    known = {**METHODS, cls.name: cls}
    METHODS.clear()
    METHODS.update(sorted(known.items(), key=lambda item: (FAMILIES.index(item[1].traits.family), item[0])))
