"""Mixed heads: every group of heads runs a method of its own.

    out = concat(attention by method 1 on its heads, attention by method 2 on its heads, …)

The best setting of Sun, Yang, Yoo 2022, "Sparse Attention with Learning-to-Hash", section 5.1, table 1: half of each
layer's heads local, half of them learned hashes.

The heads are dealt out in order, in proportion to the shares. A part sees its heads as if there were no others: its
learned parameters, its random planes and its auxiliary loss are those that it would have alone.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from subquad.masks import Mask
from subquad.methods.core.grammar import A_SHARE, as_term, joined, terms
from subquad.methods.core.head_subset import Heads
from subquad.methods.core.method import Call, Method, Part, Partial, Traits
from subquad.methods.core.mixture import combined, common_seed, is_mixture, refusal, trait_values
from subquad.methods.core.names import parse_method
from subquad.methods.core.settings import text_of_methods
from subquad.methods.lha import LearnedHash
from subquad.methods.local import Local


def of_heads(methods: Sequence[Method]) -> Traits:
    """The combined traits of methods on different heads."""
    return combined(
        methods,
        exact_limit="each group of heads is exact where its own method is: see there",
        example={"methods": "local:window=4+lha:buckets=4;hidden=8"},
        source="Sun et al. 2022, section 5.1 (half of the heads local, half hashed). "
        + trait_values(methods, "source"),
    )


def written(parts: Sequence[Part]) -> str:
    """The canonical text of parts: equal neighbours joined, smallest shares, no default settings."""
    together = [(text, sum(p.share for p in run)) for text, run in groupby(parts, key=lambda p: as_term(p.method))]
    common = math.gcd(*(share for _, share in together))
    return joined(text if share == common else f"{share // common}*{text}" for text, share in together)


def read(text: str) -> list[Part]:
    """The parts of a text like `3*local:window=32+lha:buckets=8;hash=mlp`. ValueError states what is wrong with it."""
    parts = [_read_part(part) for part in terms(text, A_SHARE)]
    for method, _ in parts:
        if isinstance(method, MixedHeads):
            raise ValueError(f"{method.name!r} inside itself: write its parts next to the others")
        if is_mixture(method):
            raise ValueError(f"{method.name!r} is a mixture itself")
        if method.traits.needs_hidden:
            raise ValueError(f"{str(method)!r} reads the layer's input for all heads together; give it whole layers")
        if method.traits.one_for_all_layers:
            raise ValueError(f"{str(method)!r} has one module for all layers, which some of the heads cannot share")
    if len({part.method for part in parts}) == 1:
        raise ValueError(f"only {str(parts[0].method)!r} is named, which needs no mixing")
    common_seed(part.method for part in parts)
    return parts


def _read_part(text: str) -> Part:
    share, star, name = text.partition("*") if "*" in text else ("", "", text)
    if star and not (share.strip().isdecimal() and int(share) > 0):
        raise ValueError(f"the share of {name.strip()!r} is {share.strip()!r}, not a whole number ≥ 1")
    return Part(parse_method(name), int(share) if star else 1)


@dataclass(frozen=True)
class MixedHeads(Method):
    """A method that runs a different method in each group of heads.

    Args:
        methods: the methods with `+` between them, their settings separated by `;`, each with a share of the heads
            before a `*` where the shares are not equal: "3*local:window=32+lha:buckets=8;hash=mlp".
            `MixedHeads.from_parts` writes it.

    Raises:
        ValueError: a text that names no methods, one method only, another mix, or parts of different seeds; and, when
            heads are there, a number of heads that the shares do not divide.

    >>> import torch, subquad as sq
    >>> q, k, v = torch.randn(3, 1, 4, 50, 8)
    >>> mixed = sq.MixedHeads("local:window=5+full")
    >>> out = sq.attention(q, k, v, method=mixed)
    >>> torch.equal(out[:, 2:], sq.attention(q[:, 2:], k[:, 2:], v[:, 2:], method="full"))
    True
    >>> mixed == sq.MixedHeads.from_parts((sq.Local(window=5), 2), ("full", 2))
    True
    """

    methods: str = text_of_methods("local+lha", examples=("local:window=2+full", "lha:buckets=2+local:window=4"))

    name: ClassVar[str] = "mixed-heads"
    traits: ClassVar[Traits] = of_heads((Local(), LearnedHash()))

    def __post_init__(self) -> None:
        try:
            text = written(read(self.methods))
            parts = read(text)
        except ValueError as error:
            raise ValueError(
                f"{self.name!r}: methods={self.methods!r}, but it must be methods with '+' between them and ';' "
                f"between their settings, as in 'local:window=32+lha:buckets=8;hash=mlp': {error}"
            ) from None
        object.__setattr__(self, "methods", text)
        object.__setattr__(self, "_parts", tuple(parts))
        super().__post_init__()

    def describe(self) -> Traits:
        """The combined traits of all parts."""
        return of_heads([part.method for part in self.parts])

    @classmethod
    def from_parts(cls, *parts: tuple[str | Method, int]) -> "MixedHeads":
        """Make a mixture from methods and their shares of the heads.

        For example `MixedHeads.from_parts(("local:window=32", 3), (LearnedHash(), 1))`.
        """
        return cls(joined(f"{share}*{as_term(method)}" for method, share in parts))

    @property
    def parts(self) -> tuple[Part, ...]:
        """The methods and their shares, in the order of the heads."""
        return self.__dict__["_parts"]

    @property
    def default_seed(self) -> int:
        """The seed of the parts."""
        return common_seed(part.method for part in self.parts)

    def deal(self, heads: int, kv_heads: int) -> list[tuple[slice, slice]]:
        """Assign query heads and key heads to each part. ValueError names what does not divide."""
        shares = [part.share for part in self.parts]
        if heads % sum(shares):
            raise ValueError(
                f"{str(self)!r} deals the heads out in {sum(shares)} equal shares, but there are {heads} heads"
            )
        ends = list(accumulate((share * heads // sum(shares) for share in shares), initial=0))
        per_key = heads // kv_heads
        between = [end for end in ends if end % per_key]
        if between:
            raise ValueError(
                f"{str(self)!r} would divide {heads} heads after head {between[0]}, but each of the {kv_heads} key "
                f"heads serves {per_key} query heads, which must stay together"
            )
        return [(slice(a, b), slice(a // per_key, b // per_key)) for a, b in pairwise(ends)]

    @property
    def exact_queries(self) -> int:
        """The fewest of any part."""
        return min(part.method.exact_queries for part in self.parts)

    def refuses(self, mask: Mask, **asked: Any) -> str | None:
        """The reason why the method refuses a call; the reason names the parts that refuse."""
        methods = [part.method for part in self.parts]
        return refusal(self, methods, mask, super().refuses(mask, **asked), **asked)

    def make_learned(self, heads: int, kv_heads: int, head_dim: int, max_length: int | None) -> nn.Module | None:
        """The learned parameters of each part that has some, under the part's number."""
        made = {
            str(number): part.method.make_learned(
                part_heads.stop - part_heads.start, keys.stop - keys.start, head_dim, max_length
            )
            for number, (part, (part_heads, keys)) in enumerate(
                zip(self.parts, self.deal(heads, kv_heads), strict=True)
            )
        }
        learned = {number: module for number, module in made.items() if module is not None}
        return nn.ModuleDict(learned) if learned else None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Partial:
        """Run each part on its own heads."""
        N, M = query.shape[2], key.shape[2]
        dealt = self._dealt(query, key, value, call)
        sized = ((part.clamped_to(N, M), inputs) for part, inputs in dealt)
        outs, lses = zip(*(part.attend_for(call.mask)(*inputs) for part, inputs in sized), strict=True)
        return torch.cat(outs, dim=1), torch.cat(lses, dim=1) if call.wants_lse else None

    def check_counts(self, N: int, M: int) -> None:
        """Check the numbers of queries and keys against each part."""
        for part in self.parts:
            part.method.check_counts(N, M)

    def of_heads(self, learned: nn.Module, heads: Heads) -> nn.Module:
        """The learned parameters of some of the heads: of each part by its own heads."""
        dealt = self.deal(heads.total, heads.key_total)
        part_state = {str(number): heads.within(*of_part)[0] for number, of_part in enumerate(dealt)}
        return nn.ModuleDict(
            {
                number: self.parts[int(number)].method.of_heads(module, part_state[number])
                for number, module in learned.named_children()
            }
        )

    @property
    def has_auxiliary_loss(self) -> bool:
        """True if one of the parts has an auxiliary loss."""
        return any(part.method.has_auxiliary_loss for part in self.parts)

    def auxiliary_loss(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor | None:
        """The mean auxiliary loss over the heads whose method has one; None if no method has."""
        dealt = self._dealt(query, key, value, call)
        present = [(part.loss_of_heads(*inputs), inputs[3].all_heads(inputs[0])) for part, inputs in dealt]
        losses = [loss * heads for loss, heads in present if loss is not None]
        sizes = [
            part_heads.stop - part_heads.start
            for part_heads, _ in self.deal(call.all_heads(query), call.all_key_heads(key))
        ]
        counted = sum(size for size, part in zip(sizes, self.parts, strict=True) if part.method.has_auxiliary_loss)
        return torch.stack(losses).sum() / counted if losses else None

    def loss_of_heads(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor | None:
        """The share of these heads in the auxiliary loss, which `auxiliary_loss` gives for some of them too."""
        return self.auxiliary_loss(query, key, value, call)

    def fit_loss(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor | None:
        """The loss by which each part is fitted."""
        dealt = self._dealt(query, key, value, call)
        return mean_over_heads([(part.fit_loss(*inputs), inputs[0].shape[1]) for part, inputs in dealt])

    def _dealt(
        self, query: Tensor, key: Tensor, value: Tensor, call: Call
    ) -> Iterator[tuple[Method, tuple[Tensor, Tensor, Tensor, Call]]]:
        """Each part with what it is called with."""
        learned = dict(call.learned.items()) if isinstance(call.learned, nn.ModuleDict) else {}
        for number, (query_heads, keys) in enumerate(self.deal(call.all_heads(query), call.all_key_heads(key))):
            heads = None
            if call.heads is not None:
                heads, query_heads, keys = call.heads.within(query_heads, keys)
            if query_heads.start == query_heads.stop:
                continue
            of_part = replace(
                call,
                mask=replace(call.mask, allowed=tuple(_of_heads(dense, query_heads) for dense in call.mask.allowed)),
                bias=None if call.bias is None else _of_heads(call.bias, query_heads),
                learned=learned.get(str(number)),
                heads=heads,
            )
            yield self.parts[number].method, (query[:, query_heads], key[:, keys], value[:, keys], of_part)


def mean_over_heads(losses: Sequence[tuple[Tensor | None, int]]) -> Tensor | None:
    """The mean of losses, weighted by their numbers of heads. None entries are skipped; None if all are None."""
    present = [(loss, heads) for loss, heads in losses if loss is not None]
    if not present:
        return None
    return torch.stack([heads * loss for loss, heads in present]).sum() / sum(heads for _, heads in present)


def _of_heads(x: Tensor, heads: slice) -> Tensor:
    """These heads of a (B, H or 1, N, M)."""
    return x if x.shape[1] == 1 else x[:, heads]
