"""The rows of a comparison: a method in a model, where it runs or why it cannot, and where its parameters come from."""

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from subquad import hf
from subquad.core.errors import InputError, as_input_error
from subquad.distributed import Sequence
from subquad.hf.plans import load_plan
from subquad.methods import BoundMethod, Full, Method
from subquad.tools.models.dtypes import FP32, TORCH
from subquad.tools.models.generation import has_exact_steps
from subquad.tools.models.pretrained import OtherAttention, Pretrained

IN = " in "  # between the name of a row and its dtype: "clustered-tail in bf16"
NOT_CALIBRATED = "not calibrated: its learned parameters are those that it starts with"


@dataclass
class CompareRow:
    """One method in one model."""

    method: Method
    layers: list[int]
    reason: str | None = None
    adapter: str | None = None  # the folder that its learned parameters come from
    bounds: dict[int, BoundMethod] = field(default_factory=dict)  # with learned parameters, by layer
    plan: str | None = None  # the folder of a plan, whose layers run the methods in `planned`
    planned: dict[int, Method | BoundMethod] = field(default_factory=dict)
    other: OtherAttention | None = None  # an implementation that is not subquad's, instead of a method
    modes: tuple[str, ...] = ()  # the messages of ranks, if tokens are split: "summary", "heads", "ring"
    dtype: str = FP32  # the dtype of the model's weights

    @property
    def name(self) -> str:
        """The method as the command line writes it; `@` and the adapter's name where parameters come from one.

        Of a plan, `plan:` and the name of its folder; of another implementation, `attention:` and its name.
        The dtype is added where it is not fp32.
        """
        if self.other is not None:
            name = f"attention:{self.other.name}"
        elif self.plan is not None:
            name = f"plan:{Path(self.plan).resolve().name}"
        else:
            name = str(self.method) if self.adapter is None else f"{self.method}@{Path(self.adapter).resolve().name}"
        return name if self.dtype == FP32 else f"{name}{IN}{self.dtype}"

    @property
    def is_exact(self) -> bool:
        """True if this is the baseline, the model's own exact attention in fp32."""
        return self.is_full and self.dtype == FP32

    @property
    def is_full(self) -> bool:
        """True if the model's own exact attention runs, in any dtype."""
        return self.method == Full() and self.plan is None and self.other is None

    @property
    def has_exact_steps(self) -> bool:
        """True if a step on a cache is exact attention in every layer, by construction."""
        return self.other is None and all(has_exact_steps(self.at(number)) for number in self.layers)

    @property
    def is_called_alone(self) -> bool:
        """True if one call of its attention is timed too."""
        return self.plan is None and self.other is None and self.dtype == FP32

    @property
    def is_named(self) -> bool:
        """True if an option of its own names it: it is measured wherever that is possible."""
        return any(each is not None for each in (self.plan, self.adapter, self.other))

    @property
    def swap(self) -> dict[int, Method | BoundMethod] | OtherAttention | None:
        """The methods by layer or the implementation that `running` runs; None = the model's own attention."""
        if self.other is not None:
            return self.other
        return None if self.is_full else {number: self.at(number) for number in self.layers}

    @property
    def note(self) -> str | None:
        """A note on its learned parameters, or on its layers; None if there is nothing to note."""
        if self.other is not None:
            return f"transformers' attention {self.other.name!r}, which is not subquad's: measured, not recommended"
        if self.plan is not None:
            methods = ", ".join(f"{number}: {self.at(number)}" for number in sorted(self.planned))
            return f"the plan of {self.plan}, by layer ({methods})"
        if not self.method.traits.learned:
            return None
        return NOT_CALIBRATED if self.adapter is None else f"with the learned parameters of {self.adapter}"

    @property
    def longest(self) -> int | None:
        """The most tokens that its learned parameters are for; None: any number, as of a plan, which knows of each."""
        return None if self.plan is not None else longest(self.bounds)

    def takes(self, length: int) -> bool:
        """True if its learned parameters fit inputs of `length` tokens."""
        return self.longest is None or length <= self.longest

    def up_to_longest(self, length: int) -> "CompareRow":
        """The row, or one without layers if its learned parameters do not fit inputs of `length` tokens."""
        if self.takes(length):
            return self
        return replace(self, layers=[], reason=f"its parameters are for at most {self.longest:,} tokens")

    def in_dtype(self, dtype: str) -> "CompareRow":
        """The row in a model whose weights have this dtype, and with its learned parameters in it."""
        bounds = {number: copy.deepcopy(bound).to(TORCH[dtype]) for number, bound in self.bounds.items()}
        planned = {
            number: copy.deepcopy(each).to(TORCH[dtype]) if isinstance(each, BoundMethod) else each
            for number, each in self.planned.items()
        }
        return replace(self, bounds=bounds, planned=planned, dtype=dtype)

    def at(self, layer: int) -> Method | BoundMethod:
        """The method that runs in a layer."""
        return self.planned.get(layer, self.bounds.get(layer, self.method))

    def alone(
        self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, parallel: Sequence | None = None
    ) -> Callable[[], Tensor]:
        """A call of the method on these inputs; learned parameters are those of the start, which cost as much."""
        heads, kv_heads, width = query.shape[1], key.shape[1], query.shape[3]
        options: dict[str, Any] = {"is_causal": is_causal, "parallel": parallel}
        if not self.method.traits.learned:
            return partial(self.method, query, key, value, enable_gqa=heads != kv_heads, **options)
        longest = max(query.shape[2], key.shape[2]) if parallel is None else parallel.tokens
        bound = self.method.bind(heads=heads, kv_heads=kv_heads, head_dim=width, max_length=longest)
        return partial(bound.to(query.device).eval(), query, key, value, **options)


def row_of(pretrained: Pretrained, method: Method) -> CompareRow:
    """The row of a method by itself."""
    layers = hf.find_layers(pretrained.model)
    with as_input_error():
        refusals = hf.refusals(pretrained.model, method)
        able = [layer for layer in layers if layer.number not in refusals]
        numbers = [layer.number for layer in able]
        if refusals and not able:
            return CompareRow(method, [], refusals[min(refusals)])
        bounds = {}
        if method.traits.learned:
            bounds = {layer.number: hf.bind(layer, method, pretrained.limit) for layer in able}
            bounds = {number: bound.to(pretrained.device).eval() for number, bound in bounds.items()}
    reason = _partly(refusals) if refusals else None
    return CompareRow(method, numbers, reason, bounds=bounds)


def row_of_adapter(pretrained: Pretrained, folder: Path) -> CompareRow:
    """The row of an adapter, whose layers all run one method.

    Raises:
        InputError: the folder contains no adapter, a damaged one, or one for another model.
    """
    with as_input_error():
        bounds = hf.read_adapter(folder).bounds(pretrained.model)
    methods = {bound.method for bound in bounds.values()}
    if len(methods) != 1:
        listed = ", ".join(sorted(map(str, methods)))
        raise InputError(f"the adapter {folder} mixes methods ({listed}); compare accepts one method in all layers")
    everywhere = len(hf.find_layers(pretrained.model)) == len(bounds)
    reason = None if everywhere else f"only in layers {', '.join(map(str, sorted(bounds)))}; the others stay exact"
    return CompareRow(methods.pop(), sorted(bounds), reason, str(folder), bounds)


def row_of_plan(pretrained: Pretrained, folder: Path) -> CompareRow:
    """The row of a plan. Its `method` is the one that most layers run, exact attention aside.

    Raises:
        InputError: the folder contains no plan, a damaged one, or one for another model.
    """
    with as_input_error():
        planned = load_plan(folder).by_layer(pretrained.model)
    methods = [
        method_of_layer.method if isinstance(method_of_layer, BoundMethod) else method_of_layer
        for method_of_layer in planned.values()
    ]
    most = Counter(method for method in methods if method != Full()).most_common(1)
    bounds = {
        number: method_of_layer
        for number, method_of_layer in planned.items()
        if isinstance(method_of_layer, BoundMethod)
    }
    method = most[0][0] if most else Full()
    return CompareRow(method, sorted(planned), None, bounds=bounds, plan=str(folder), planned=planned)


def check_names(rows: Iterable[tuple[str, str | None]]) -> None:
    """InputError for two rows of one name, whose figures would be mixed: each a name and the folder it is made of."""
    folders: dict[str, list[str]] = {}
    for name, folder in rows:
        folders.setdefault(name, []).append(folder or "--methods")
    for name, each in folders.items():
        if len(each) > 1:
            raise InputError(f"two rows are called {name!r}, of {' and '.join(each)}: rename one of the folders")


def _partly(refusals: dict[int, str]) -> str:
    return f"layers {', '.join(map(str, refusals))} stay exact: {refusals[min(refusals)]}"


def longest(bounds: Mapping[int, BoundMethod]) -> int | None:
    """The most tokens that these parameters are for; None: any number, as with most methods."""
    parts = [part for bound in bounds.values() if bound.learned is not None for part in bound.learned.modules()]
    limits = [limit for part in parts if isinstance(limit := getattr(part, "max_length", None), int)]
    return min(limits, default=None)


def mark_of(bounds: dict[int, BoundMethod]) -> float:
    """A number that changes with the learned parameters."""
    return sum((float(p.detach().double().abs().sum()) for b in bounds.values() for p in b.parameters()), 0.0)
