"""Sums of methods: each part chooses keys for a query, and each key counts once.

    K_i    = the kept tokens ("keep")                          columns, and rows of the kept tokens themselves
    P_i    = keys that one of the other parts chooses for query i, less K_i
    R      = the residual: a summary of all keys, in which key j has the weight r_ij ≥ 0

    w_ij   = e^{scale·q_i·k_j}    for j in K_i or P_i
           = r_ij                 for all others; 0 without such a part
    out_i  = Σ_j w_ij v_j / Σ_j w_ij,   lse_i = ln Σ_j w_ij

The parts other than "keep" see a sequence from which the kept tokens are missing, as if they were padding. A pair that
several parts choose, or one part several times, counts once (`kernels.selection.deduplication`). Of the residual, what
it gives the keys in P_i is subtracted (`kernels.attention.residual_merging`): for feature maps that is how Chen et al.
2021, "Scatterbrain: Unifying Sparse and Low-rank Attention", section 4, add a sparse and a low-rank attention; for
cells of keys r_ij is the weight of k_j for the cluster's mean query, moved to q_i to first order
(`kernels.attention.tail`), and its exact keys belong to P_i.

A part gives its choice of keys and nothing else: those of "reformer" or "routing", for example, are then attended to by
the products of queries and keys, as all others.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from subquad.kernels.attention.pairs.op import attend_pairs
from subquad.kernels.attention.residual_merging import merge_with_residual
from subquad.kernels.attention.softmax import merge_partials
from subquad.kernels.selection.deduplication import first_meetings
from subquad.kernels.tokens.padding import cleared_inputs
from subquad.kernels.tokens.positions import ValidPositions
from subquad.kernels.tokens.slots import Buckets
from subquad.masks import Mask
from subquad.methods.core.bucketed import Bucketed, StepByPosition, attend_inside
from subquad.methods.core.call import PrepareStep
from subquad.methods.core.fitting import output_error
from subquad.methods.core.grammar import MISSING, as_term, joined, terms
from subquad.methods.core.method import Call, Method, Partial, Traits
from subquad.methods.core.mixture import combined, common_seed, is_mixture, refusal, trait_values
from subquad.methods.core.names import parse_method
from subquad.methods.core.residual import Residual, refusal_of_residual
from subquad.methods.core.settings import text_of_methods
from subquad.methods.keep_positions import Keep
from subquad.methods.local import Local


def chooses(method: Method) -> bool:
    """True if a part is a choice of pairs and nothing more."""
    return isinstance(method, Bucketed) and not isinstance(method, Keep) and not method.summarises


def of_sum(methods: Sequence[Method]) -> Traits:
    """The combined traits of the parts of a sum. Parts that are causal by halves stay so with kept tokens only."""
    changes: dict[str, Any] = {"causal": "no"} if any(map(chooses, methods)) and _by_halves(methods) else {}
    return combined(
        methods,
        **changes,
        unit="none",
        exact_limit="a sum is exact where its parts together choose all keys of each query",
        example={"terms": "local:window=4+keep:first+performer:features=16"},
        source="the parts' own: " + trait_values(methods, "source"),
    )


def _by_halves(methods: Sequence[Method]) -> bool:
    return any(method.traits.by_halves for method in methods)


def read(text: str) -> list[Method]:
    """The parts of a text like `local:window=32+keep:first`, in their order. ValueError states what is wrong."""
    methods: list[Method] = []
    for term in terms(text):
        if not term:
            raise ValueError(f"{MISSING}, as in 'local:window=32+keep:first'")
        method = parse_method(term)
        methods += method.addends if isinstance(method, Sum) else [method]
    for number, method in enumerate(methods):
        _check_part(method)
        if method in methods[:number]:
            raise ValueError(f"{str(method)!r} is named twice; a key counts once, so name it once")
    if len(methods) == 1:
        raise ValueError(f"only {str(methods[0])!r} is named, which needs no sum")
    kept = [method for method in methods if isinstance(method, Keep)]
    if len(kept) > 1:
        raise ValueError(
            f"{str(kept[0])!r} and {str(kept[1])!r} are two lists of kept tokens; write one, as first=4,every=64"
        )
    pairs = sorted((method for method in methods if chooses(method)), key=str)
    others = [method for method in methods if method not in kept and not chooses(method)]
    if len(others) > 1:
        raise ValueError(
            f"{str(others[0])!r} and {str(others[1])!r} both represent all keys, which would count twice; leave one out"
        )
    if pairs and others:
        refused = refusal_of_residual(others[0], pairs[0])
        if refused:
            raise ValueError(refused)
    common_seed(methods)
    return [*pairs, *kept, *others]


def _check_part(method: Method) -> None:
    """Raise ValueError for a method that cannot be a part of any sum."""
    if is_mixture(method):
        raise ValueError(f"{method.name!r} divides the heads or the lengths; write the sum inside it, in parentheses")
    if method.is_exact:
        raise ValueError(f"{str(method)!r} counts every key by itself, which leaves nothing to add")
    if method.traits.relative or getattr(method, "weighs", False):
        raise ValueError(f"{str(method)!r} has terms of the distance in its logits, which the other parts have not")
    if method.traits.one_for_all_layers:
        raise ValueError(f"{str(method)!r} has one module for all layers, which a part of a sum cannot share")
    if not method.traits.lse:
        raise ValueError(f"{str(method)!r} has no log-sum-exp, without which it cannot be added to other attention")


@dataclass(frozen=True)
class Sum(Method):
    """A combination of several methods in one attention, in which each key counts once.

    Args:
        terms: the methods with `+` between them. Any number choose pairs, such as "local", "lha" or "smyrf", one may be
            "keep", and one may be the residual, such as "lha-tail", "clustered-tail" or "performer". In Python the
            same is `sq.Local(window=32) + sq.Keep(first=1)`, or `Sum.from_methods`.

    Raises:
        ValueError: a text that names no methods, one method only, one twice, two residuals, a method that
            cannot be a part, or methods of different seeds.

    >>> import torch, subquad as sq
    >>> q, k, v = torch.randn(3, 1, 2, 300, 4)
    >>> method = sq.Local(window=20) + sq.Keep(first=2) + sq.Performer()
    >>> sq.attention(q, k, v, method=method).shape
    torch.Size([1, 2, 300, 4])
    >>> print(method)
    local:window=20+keep:first=2+performer
    >>> method == sq.parse_method("keep:first=2+performer+local:window=20")
    True
    """

    terms: str = text_of_methods("local+keep", examples=("local:window=2+keep:last", "local:window=3+lsh:buckets=2"))

    name: ClassVar[str] = "sum"
    traits: ClassVar[Traits] = of_sum((Local(), Keep()))

    def __post_init__(self) -> None:
        try:
            parts = read(self.terms)
            text = joined(map(as_term, parts))
        except ValueError as error:
            if "+" in self.terms:
                raise ValueError(f"the sum {self.terms!r}: {error}") from None
            raise ValueError(
                f"{self.name!r}: terms={self.terms!r}, but it must be methods with '+' between them, as in "
                f"'local:window=32+keep:first': {error}"
            ) from None
        object.__setattr__(self, "terms", text)
        object.__setattr__(self, "_addends", tuple(parts))
        super().__post_init__()

    def __str__(self) -> str:
        """The parts with `+` between them, as on the command line."""
        return joined(map(str, self.addends))

    @property
    def label(self) -> str:
        """The method with its settings: no user writes its name."""
        return str(self)

    @classmethod
    def from_methods(cls, *methods: str | Method) -> "Sum":
        """Make a sum from methods: `Sum.from_methods("local:window=32", sq.Keep(first=1))`."""
        return cls(joined(map(as_term, methods)))

    def describe(self) -> Traits:
        """The combined traits of all parts."""
        return of_sum(self.addends)

    @property
    def addends(self) -> tuple[Method, ...]:
        """The parts by kind: those that choose pairs, kept tokens, the residual."""
        return self.__dict__["_addends"]

    @property
    def prepare_step(self) -> PrepareStep | None:
        """The preparation of exact attention to the keys of all parts, if each prepares its own; None otherwise."""
        return StepByPosition(self) if all(part.prepare_step for part in self.addends) else None

    @property
    def default_seed(self) -> int:
        """The seed of the parts."""
        return common_seed(self.addends)

    @property
    def has_auxiliary_loss(self) -> bool:
        """True if one of the parts has an auxiliary loss."""
        return any(part.has_auxiliary_loss for part in self.addends)

    def refuses(self, mask: Mask, **asked: Any) -> str | None:
        """The reason why the method refuses a call; the reason names the parts that refuse."""
        return refusal(self, self.addends, mask, super().refuses(mask, **asked), **asked)

    def check_counts(self, N: int, M: int) -> None:
        """Check the numbers of queries and keys against each part."""
        for part in self.addends:
            part.check_counts(N, M)

    def make_learned(self, heads: int, kv_heads: int, head_dim: int, max_length: int | None) -> nn.Module | None:
        """The learned parameters of each part that has some, under the part's number."""
        made = [part.make_learned(heads, kv_heads, head_dim, max_length) for part in self.addends]
        learned = {str(number): module for number, module in enumerate(made) if module is not None}
        return nn.ModuleDict(learned) if learned else None

    def only_bound(self) -> str:
        """The refusal of a call without a layer, naming the part with learned parameters."""
        learned = [part.name for part in self.addends if part.traits.learned]
        return (
            f"{self.label!r}: its part {learned[0]!r} has learned parameters, so it runs only as a bound method: in "
            "sq.nn.MultiheadAttention, by sq.hf.swap, or by method.bind(heads=…, head_dim=…)"
        )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Partial:
        """Merge the attention of the parts: kept tokens, chosen pairs, the residual."""
        kept, call = self._without_kept(query, key, call)
        cleared = cleared_inputs(query, key, value, call.mask) if kept else (query, key, value)
        ready = list(self._ready(call, query.shape[2], key.shape[2]))
        choosing = sorted((each for each in ready if chooses(each[0])), key=lambda each: not each[0].pairs_once)
        reader = next((each for each in ready if not chooses(each[0])), None)
        met = [part.meetings(*cleared[:2], part_call) for part, part_call in choosing]
        for part, part_call in choosing:
            part.follow(*cleared[:2], part_call)

        partials: list[Any] = []
        if reader is None:
            first = met.pop(0) if met and choosing[0][0].pairs_once else ()
            sure, residual = (*kept, *first), None
        elif met:
            residual = reader[0].residual(*cleared, replace(reader[1], wants_lse=True))
            first, sure = residual.exact, (*kept, *residual.exact)
        else:
            residual, first, sure = None, (), kept
            partials.append(reader[0].attend_partial(*cleared, replace(reader[1], wants_lse=True)))
        if sure:  # sets without a pair in common
            partials.append(attend_inside(query, key, value, sure, call))
        if met:
            alone = len(met) == 1 and len(first) == 0 and choosing[0][0].pairs_once
            partials.append(_attend_once(query, key, value, sum(met, ()), first, residual, call, alone))
        return partials[0] if len(partials) == 1 else merge_partials(partials)

    def _without_kept(self, query: Tensor, key: Tensor, call: Call) -> tuple[tuple[Buckets, ...], Call]:
        """The meetings with the kept tokens, and the call in which these are padding."""
        keep: Any = next((part for part in self.addends if isinstance(part, Keep)), None)
        if keep is None:
            return (), call
        N, M = query.shape[2], key.shape[2]
        kept = keep.clamped_to(N, M).kept(ValidPositions.from_mask(call.mask, query, key))
        return kept.meetings(query.shape[1]), call.under(kept.left_out())

    def _ready(self, call: Call, N: int, M: int) -> Iterator[tuple[Any, Call]]:
        """The parts but the kept tokens, each with the call that has its own learned parameters."""
        learned = dict(call.learned.items()) if isinstance(call.learned, nn.ModuleDict) else {}
        for number, part in enumerate(self.addends):
            if not isinstance(part, Keep):
                yield part.clamped_to(N, M), replace(call, learned=learned.get(str(number)))

    def meetings(self, query: Tensor, key: Tensor, call: Call) -> tuple[Buckets, ...]:
        """Pairs of queries and keys that meet individually; a pair may be listed several times."""
        kept, call = self._without_kept(query, key, call)
        ready = self._ready(call, query.shape[2], key.shape[2])
        return kept + sum(
            (part.meetings(query, key, part_call) for part, part_call in ready if isinstance(part, Bucketed)), ()
        )

    def auxiliary_loss(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor | None:
        """The sum of the auxiliary losses of the parts that have one; None if none has."""
        _, call = self._without_kept(query, key, call)
        ready = self._ready(call, query.shape[2], key.shape[2])
        return _sum_of([part.auxiliary_loss(query, key, value, part_call) for part, part_call in ready])

    def fit_loss(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor | None:
        """The auxiliary losses, and the relative error of the sum's output if a part learns from it."""
        losses = [self.run_auxiliary_loss(query, key, value, call)]
        if any(part.traits.fit is not None and not part.has_auxiliary_loss for part in self.addends):
            losses.append(output_error(self, query, key, value, call, of_mean=1.0))
        return _sum_of(losses)


def _attend_once(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    met: tuple[Buckets, ...],
    first: tuple[Buckets, ...],
    residual: Residual | None,
    call: Call,
    alone: bool,
) -> Partial:
    """Attention to the pairs that meet, less those of `first`, each once; with a rest, to all other keys too.

    `alone` means that no pair meets twice.
    """
    shown = None if alone else first_meetings(met, query.shape[2], key.shape[2], call.mask, first)
    partial = attend_inside(query, key, value, met, call, shown=shown)
    if residual is None:
        return partial
    valid, (out, lse) = call.mask.query_padding(query.shape[2]), residual.partial
    assert lse is not None
    lse = lse if valid is None else lse.masked_fill(~valid[:, None], -torch.inf)
    options: dict[str, Any] = {"scale": 1.0, "shown": shown, "by_features": residual.by_features}
    of_met = attend_pairs(residual.of_query, residual.of_key, value, met, call.mask, **options)
    return merge_with_residual(partial, (out, lse), of_met)


def _sum_of(losses: Sequence[Tensor | None]) -> Tensor | None:
    """The sum of losses; None entries are skipped, and None if all are None."""
    present = [loss for loss in losses if loss is not None]
    return torch.stack(present).sum() if present else None
