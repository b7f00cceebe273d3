"""Operators of torch's dispatcher that compiled backends compute, and their gradients.

An operator takes arguments of its op, under the same names, which are stated once, with the op (`Op.operator`).
In Python they travel as one named tuple, `x` in the files of backends.
"""

import functools
import inspect
import types
from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, get_args

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from subquad.core.torch_ops import define, differentiate
from subquad.kernels.tensors import token_major

# The context, set by `dispatch.tracing`, in which operators on meta tensors also call the backend's function.
TRACED: ContextVar[Callable[[], AbstractContextManager[Any]] | None] = ContextVar("subquad_traced", default=None)


def record(name: str, parameters: Sequence[inspect.Parameter]) -> Any:
    """The named tuple of a function's arguments, with the function's defaults."""
    defaults = [p.default for p in parameters if p.default is not p.empty]
    assert all(p.default is not p.empty for p in parameters[len(parameters) - len(defaults) :]), name
    return namedtuple(name, [p.name for p in parameters], defaults=defaults)


def parameter(name: str, annotation: Any) -> inspect.Parameter:
    """A parameter of an operator, whose annotation contains what torch's schema needs."""
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=_plain(annotation))


def _plain(annotation: Any) -> Any:
    """The annotation without the names of axes: Float[Tensor, "B N"] | None as Tensor | None."""
    if isinstance(annotation, types.UnionType):
        first, *others = (_plain(each) for each in annotation.__args__)
        return functools.reduce(lambda a, b: a | b, others, first)
    return getattr(annotation, "array_type", annotation)


class Operator:
    """A torch operator that compiled backends compute, under its name in `torch.ops.subquad`.

    Made from the function that allocates its outputs. The operator's schema holds the backend's name, then the
    parameters. A backend's function gets the outputs, to be filled, and the arguments by name. `run` is the operator.
    """

    def __init__(self, outputs: Callable[[Any], Any], parameters: Sequence[inspect.Parameter], returns: Any = None):
        self.__doc__ = outputs.__doc__
        self.name, self.outputs, self.parameters = outputs.__name__, outputs, parameters
        self.returns = inspect.signature(outputs).return_annotation if returns is None else returns
        self._computed: dict[str, Callable[[Any, Any], None]] = {}
        self._prepared: dict[str, Callable[[Any], Callable[..., Any]]] = {}

        def fake(*args: Any) -> Any:
            return self.outputs(self.from_torch(args))

        fake.__signature__ = inspect.Signature(parameters, return_annotation=self.returns)  # type: ignore[attr-defined]
        self.run = define(self.name, self._compute, fake, first="str backend", traced=self._trace)

    @functools.cached_property  # most operators are never called, and making the class takes 0.2 ms
    def arguments(self) -> Any:
        """The named tuple of the arguments."""
        return record(self.name, self.parameters)

    def from_torch(self, args: tuple[Any, ...]) -> Any:
        """The arguments by name."""
        return self.arguments(*args)

    def _compute(self, backend: str, *args: Any) -> Any:
        x = self.from_torch(args)
        outputs = self.outputs(x)
        self._computed[backend](outputs, x)
        return outputs

    def _trace(self, backend: str, *args: Any) -> Any:
        inside = TRACED.get()
        if inside is None:
            return self.outputs(self.from_torch(args))
        with inside():
            return self._compute(backend, *args)

    def on(self, backend: str) -> Callable[[Callable[[Any, Any], None]], Callable[[Any, Any], None]]:
        """Register what fills the outputs on a backend."""

        def add(compute: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
            self._computed[backend] = compute
            return compute

        return add

    def prepared_on(self, backend: str) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
        """Register what makes a function for many calls on a backend, as `prepare` returns it."""

        def add(prepare: Callable[[Any], Any]) -> Callable[[Any], Any]:
            self._prepared[backend] = prepare
            return prepare

        return add

    def prepare(self, backend: str, x: Any, *names: str) -> Callable[..., Any]:
        """The operator's first output as a function of the arguments of these names; the others are those of `x`.

        Shapes and dtypes are those of `x` too. Without a mode or a profiler, which see operators, a backend may run it
        without torch's dispatcher.
        """
        fixed = [name for name in self.arguments._fields if name not in names]
        assert [*names, *fixed] == list(self.arguments._fields), "the names are the first ones"
        others = tuple(getattr(x, name) for name in fixed)
        direct = self._prepared[backend](x) if backend in self._prepared else None

        def run(*tensors: Tensor) -> Any:
            if direct is None or _operators_are_observed() or any(type(each) is not Tensor for each in tensors):
                return self.run(backend, *tensors, *others)[0]
            return direct(*tensors)

        return run

    def gradient(self, backward: Callable[..., Any], save: Callable[..., Any] | None = None) -> None:
        """Set the gradient; both get what `torch.library.register_autograd` gives them."""
        differentiate(self.name, backward, save)

    def flops(self, count: Callable[..., int]) -> Callable[..., int]:
        """Set how many operations of products `torch.utils.flop_counter.FlopCounterMode` counts.

        `count` gets the arguments by name, with shapes in the place of tensors.
        """
        packet = getattr(torch.ops.subquad, self.name)
        register_flop_formula([packet])(lambda backend, *args, **_: count(self.from_torch(args)))
        return count


def _operators_are_observed() -> bool:
    """True if modes of torch or a profiler are active, which see each operator that runs."""
    modes = torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack()
    return modes > 0 or torch._C._autograd._profiler_enabled()


def shapes_of(x: Any) -> Any:
    """The arguments of an operator with shapes in the place of tensors."""
    return type(x)(*(each.shape if isinstance(each, Tensor) else each for each in x))


class Gradient(Operator):
    """The operator that computes the gradients of some arguments of another one; it is itself not differentiable.

    Its arguments are the gradients of the other's outputs (`x.grads`, None where nobody differentiates one), those
    outputs (`x.outputs`), and the other's arguments. Its outputs are one gradient for each argument in `names`, in the
    dtype of the first output, and an empty tensor for one that is None.
    """

    def __init__(self, forward: Operator, *names: str, title: str):
        self.forward, self.names, self.title = forward, names, title
        self.count = len(get_args(forward.returns))
        grads = [parameter(f"grad_{i}", Tensor | None) for i in range(self.count)]
        outputs = [parameter(f"output_{i}", Tensor) for i in range(self.count)]

        def gradients(x: Any) -> tuple[Tensor, ...]:
            return tuple(_empty_gradient(getattr(x, name), x.outputs[0]) for name in names)

        gradients.__name__ = forward.name.replace("forward", "backward")
        returns = types.GenericAlias(tuple, (Tensor,) * len(names))
        super().__init__(gradients, [*grads, *outputs, *forward.parameters], returns)
        forward.gradient(self._differentiate, self._save)
        self.gradient(self._refuse)

    @functools.cached_property
    def arguments(self) -> Any:
        """The named tuple of the arguments, with the gradients as one, and the outputs."""
        return record(self.name, [parameter("grads", tuple), parameter("outputs", tuple), *self.forward.parameters])

    def from_torch(self, args: tuple[Any, ...]) -> Any:
        """The arguments by name."""
        return self.arguments(args[: self.count], args[self.count : 2 * self.count], *args[2 * self.count :])

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
        computed = dict(zip(self.names, self.run(ctx.backend, *grads, *outputs, *args), strict=True))
        results: list[Any] = [None]
        for name, arg in zip(self.forward.arguments._fields, args, strict=True):
            if name in computed and arg is not None:
                results.append(computed[name].to(arg.dtype))
            else:
                results.append([None] * len(arg) if isinstance(arg, list) and _tensors(arg) else None)
        return tuple(results)

    def _refuse(self, ctx: Any, *_: Any) -> None:
        raise NotImplementedError(
            f"the gradient of {self.title} in compiled code cannot be differentiated again; for second derivatives run "
            "the forward pass on plain PyTorch, `with sq.use_backend('reference'), torch.nn.attention.sdpa_kernel("
            "torch.nn.attention.SDPBackend.MATH):`"
        )


_TENSOR = object()  # represents a tensor that is saved


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
