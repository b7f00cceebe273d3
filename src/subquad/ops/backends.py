"""Backends: the implementations of the ops, and the choice of the one that runs.

`reference` is plain PyTorch, on any device: the truth. A compiled backend must equal it. A backend registers itself
(`register`), and for each op that it has it registers, in one file, why it cannot take a call (`Op.refusal`) and what
computes the op's torch operators (`Operator.on`). Nobody who calls an op names a backend.
"""

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, get_args

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from subquad.ops.tensors import token_major
from subquad.torch_ops import define, differentiate

P = ParamSpec("P")
R = TypeVar("R")

# name -> says why the backend cannot run here, or None when it can
_BACKENDS: dict[str, Callable[[], str | None]] = {"reference": lambda: None}
_forced: ContextVar[str | None] = ContextVar("subquad_backend", default=None)
_traced: ContextVar[Callable[[], AbstractContextManager[Any]] | None] = ContextVar("subquad_traced", default=None)
_open_blocks: list[str] = []  # of `use_backend`, in all threads: what torch.compile can read


def register(name: str, refusal: Callable[[], str | None]) -> None:
    """Add a compiled backend; `refusal` says why it cannot run on this machine, or returns None when it can."""
    _BACKENDS[name] = refusal


def backends() -> dict[str, str]:
    """Every backend with "available", or the reason why it cannot run here.

    >>> backends()["reference"]
    'available'
    """
    return {name: refusal() or "available" for name, refusal in _BACKENDS.items()}


def choose(**refusals: str | None) -> str:
    """The backend for one call: of those that run here and take it the one registered last, or else "reference".

    Args:
        refusals: For each compiled backend that has the op, why it cannot take this call, or None when it can.

    Raises:
        ValueError: the backend forced by `use_backend` cannot take this call (with the reason).

    >>> choose(cpu="the tensors are on cuda:0")
    'reference'
    """
    forced = _forced_now()
    if forced is None:
        taking = (name for name in reversed(_BACKENDS) if refusals.get(name, "no such op") is None)
        return next((name for name in taking if _BACKENDS[name]() is None), "reference")
    if forced != "reference":
        reason = refusals.get(forced, "it does not have this op")
        if reason is not None:
            raise ValueError(f"backend {forced!r} cannot run this call: {reason}")
    return forced


def chosen_backend() -> str:
    """The backend that ops run on now: the one forced, else the one registered last of those available."""
    return choose(**dict.fromkeys(name for name in _BACKENDS if name != "reference"))


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Force one backend inside the block, in this thread or task only.

    A function compiled by `torch.compile` follows blocks too, but those of all threads: it takes the block opened last.

    Raises:
        ValueError: there is no such backend, or it cannot run here (with the reason).
    """
    if name not in _BACKENDS:
        raise ValueError(f"no backend {name!r}; there are {', '.join(_BACKENDS)}")
    reason = _BACKENDS[name]()
    if reason is not None:
        raise ValueError(f"backend {name!r} cannot run here: {reason}")
    with _forcing(name):
        yield


@contextmanager
def tracing(name: str, inside: Callable[[], AbstractContextManager[Any]] = nullcontext) -> Iterator[None]:
    """Force a backend, also one that cannot run here, and let its functions see what compilers see: shapes.

    Inside the block an operator on meta tensors not only makes its outputs but also calls the backend's function, in a
    new context of `inside`: modes of torch that see an operator do not see what it calls.
    """
    token = _traced.set(inside)
    try:
        with _forcing(name):
            yield
    finally:
        _traced.reset(token)


def is_tracing() -> bool:
    """Whether a block of `tracing` is open."""
    return _traced.get() is not None


@contextmanager
def _forcing(name: str) -> Iterator[None]:
    token = _forced.set(name)
    _open_blocks.append(name)
    try:
        yield
    finally:
        _open_blocks.remove(name)
        _forced.reset(token)


def _forced_now() -> str | None:
    if torch.compiler.is_compiling():  # Dynamo cannot read a ContextVar; of a global, it compiles again after a change
        return _open_blocks[-1] if _open_blocks else None
    return _forced.get()


class Op(Generic[P, R]):
    """An op: the function in plain PyTorch that it is made from, the truth, and the backends that have it too."""

    def __init__(self, reference: Callable[P, R]):
        functools.update_wrapper(self, reference)
        self.reference = reference
        self._refusals: dict[str, Callable[..., str | None]] = {}

    def compiled(self, run: Callable[Concatenate[str, P], R]) -> None:
        """Set what runs on compiled backends, all of them: the op's arguments behind the backend's name."""
        self._compiled = run

    def refusal(self, backend: str) -> Callable[[Callable[..., str | None]], Callable[..., str | None]]:
        """Register that a backend has this op, with what says why it cannot take a call; None when it can."""

        def add(refusal: Callable[..., str | None]) -> Callable[..., str | None]:
            self._refusals[backend] = refusal
            return refusal

        return add

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run on the backend that `choose` gives."""
        backend = choose(**{name: refusal(*args, **kwargs) for name, refusal in self._refusals.items()})
        return self.reference(*args, **kwargs) if backend == "reference" else self._compiled(backend, *args, **kwargs)


class Operator:
    """A torch operator that compiled backends compute, under its name in `torch.ops.subquad`.

    Made from the function that allocates its outputs, whose annotations are the operator's schema behind a first
    argument, the backend's name. A backend's function gets the outputs, to be filled, and the arguments by name.
    """

    def __init__(self, outputs: Callable[..., Any]):
        functools.update_wrapper(self, outputs)
        self.name, self.outputs = outputs.__name__, outputs
        self.signature = inspect.signature(outputs)
        self._computed: dict[str, Callable[[Any, Any], None]] = {}
        self._run = define(self.name, self._compute, outputs, first="str backend", traced=self._trace)

    def __call__(self, backend: str, *args: Any) -> Any:
        """Compute the outputs on this backend."""
        return self._run(backend, *args)

    def _compute(self, backend: str, *args: Any) -> Any:
        outputs = self.outputs(*args)
        self._computed[backend](outputs, self._given(args))
        return outputs

    def _trace(self, backend: str, *args: Any) -> Any:
        inside = _traced.get()
        if inside is None:
            return self.outputs(*args)
        with inside():
            return self._compute(backend, *args)

    def _given(self, args: tuple[Any, ...]) -> SimpleNamespace:
        return SimpleNamespace(**dict(zip(self.signature.parameters, args, strict=True)))

    def on(self, backend: str) -> Callable[[Callable[[Any, Any], None]], Callable[[Any, Any], None]]:
        """Register what fills the outputs on a backend."""

        def add(compute: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
            self._computed[backend] = compute
            return compute

        return add

    def gradient(self, backward: Callable[..., Any], save: Callable[..., Any] | None = None) -> None:
        """Set the gradient; both get what `torch.library.register_autograd` gives them."""
        differentiate(self.name, backward, save)

    def flops(self, count: Callable[..., int]) -> None:
        """Set how many operations of products `torch.utils.flop_counter.FlopCounterMode` counts.

        `count` gets the arguments by name, with shapes in the place of tensors.
        """
        packet = getattr(torch.ops.subquad, self.name)
        register_flop_formula([packet])(lambda backend, *args, **_: count(self._given(args)))


def shapes_of(given: SimpleNamespace) -> SimpleNamespace:
    """The arguments of an operator with shapes in the place of tensors."""
    return SimpleNamespace(**{k: x.shape if isinstance(x, Tensor) else x for k, x in vars(given).items()})


class Gradient(Operator):
    """The operator that computes the gradients of some arguments of another one; it is itself not differentiable.

    Its arguments are the gradients of the other's outputs (`given.grads`, None where nobody differentiates one), those
    outputs (`given.outputs`), and the other's arguments. Its outputs are one gradient for each argument in `of`, in
    the dtype of the first output, and an empty tensor for one that is None.
    """

    def __init__(self, forward: Operator, *of: str, named: str):
        self.forward, self.of, self.named = forward, of, named
        self.count = len(get_args(forward.signature.return_annotation))
        before = [("grad", Tensor | None)] * self.count + [("output", Tensor)] * self.count
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        first = [inspect.Parameter(f"{what}_{i}", kind, annotation=t) for i, (what, t) in enumerate(before)]

        def gradients(*args: Any) -> tuple[Tensor, ...]:
            given = self._given(args)
            return tuple(_empty_gradient(getattr(given, name), given.outputs[0]) for name in of)

        results = types.GenericAlias(tuple, (Tensor,) * len(of))
        signature = inspect.Signature([*first, *forward.signature.parameters.values()], return_annotation=results)
        gradients.__name__ = forward.name.replace("forward", "backward")
        gradients.__signature__ = signature  # type: ignore[attr-defined]
        super().__init__(gradients)
        forward.gradient(self._differentiate, self._save)
        self.gradient(self._refuse)

    def _given(self, args: tuple[Any, ...]) -> SimpleNamespace:
        grads, outputs, rest = args[: self.count], args[self.count : 2 * self.count], args[2 * self.count :]
        return SimpleNamespace(
            grads=grads, outputs=outputs, **dict(zip(self.forward.signature.parameters, rest, strict=True))
        )

    def _save(self, ctx: Any, inputs: Any, output: Any) -> None:
        ctx.backend, *args = inputs
        tensors = [x for arg in (*output, *args) for x in (arg if isinstance(arg, list | tuple) else [arg])]
        ctx.save_for_backward(*(x for x in tensors if isinstance(x, Tensor)))
        ctx.args = [_without_tensors(arg) for arg in args]
        ctx.set_materialize_grads(False)  # often nobody differentiates all outputs

    def _differentiate(self, ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        if all(grad is None for grad in grads):
            return (None,) * (len(ctx.args) + 1)
        saved = iter(ctx.saved_tensors)  # once: activation checkpointing computes them when they are asked for
        outputs = [next(saved) for _ in range(self.count)]
        args = [_with_tensors(arg, saved) for arg in ctx.args]
        computed = dict(zip(self.of, self(ctx.backend, *grads, *outputs, *args), strict=True))
        results: list[Any] = [None]
        for name, arg in zip(self.forward.signature.parameters, args, strict=True):
            if name in computed and arg is not None:
                results.append(computed[name].to(arg.dtype))
            else:
                results.append([None] * len(arg) if isinstance(arg, list) and _tensors(arg) else None)
        return tuple(results)

    def _refuse(self, ctx: Any, *_: Any) -> None:
        raise NotImplementedError(
            f"the gradient of {self.named} in compiled code cannot be differentiated again; for second derivatives run "
            "the forward pass on plain PyTorch, `with sq.use_backend('reference'), torch.nn.attention.sdpa_kernel("
            "torch.nn.attention.SDPBackend.MATH):`"
        )


_TENSOR = object()  # stands for a tensor that is saved


def _tensors(arg: Any) -> bool:
    return all(isinstance(x, Tensor) for x in arg)


def _without_tensors(arg: Any) -> Any:
    if isinstance(arg, Tensor):
        return _TENSOR
    return [_TENSOR] * len(arg) if isinstance(arg, list | tuple) and _tensors(arg) else arg


def _with_tensors(arg: Any, saved: Iterator[Tensor]) -> Any:
    if isinstance(arg, list):
        return [next(saved) if x is _TENSOR else x for x in arg]
    return next(saved) if arg is _TENSOR else arg


def _empty_gradient(x: Tensor | None, like: Tensor) -> Tensor:
    """Token-major for vectors, as the projections before an attention are, so that their gradients need no copy."""
    if x is None:
        return like.new_empty(0)
    return token_major(x, x.shape[3], like.dtype) if x.ndim == 4 else like.new_empty(x.shape)
