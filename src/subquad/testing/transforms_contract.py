"""The contract of torch's transforms and defaults: derivatives of all kinds, `vmap`, tracing, other default devices.

Every method takes part in them, or raises an error that states the remedy.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

import subquad as sq
from subquad import Mask, Method
from subquad.testing.contract import Contract, bound_for, lengths_to_bool, once, where
from subquad.testing.nonfinite_contract import on_each_backend
from subquad.testing.oracle import gradients, hidden_for, normal, qkv, tracked

N = 40
Function = Callable[[Tensor], Tensor]

close = torch.testing.assert_close


def attention(method: Method, training: bool = False) -> tuple[Function, Tensor, Tensor]:
    """A method as a function of the query alone, the query, and a direction."""
    query, key, value = qkv(N, E=8)
    bound = bound_for(method, query, key, value).train(training)
    return lambda query: bound(query, key, value, **hidden_for(method, query)), query, normal(*query.shape, seed=9)


def gradient(function: Function) -> Function:
    """The gradient of the sum of the output's sines."""
    return grad(lambda query: function(query).sin().sum())


def tangent(function: Function, along: Tensor) -> Function:
    """The derivative in a direction."""
    return lambda query: jvp(function, (query,), (along,))[1]


NESTED: dict[str, Callable[[Function, Tensor], Function]] = {  # what `vmap` runs
    "grad": lambda function, along: gradient(function),
    "jvp": tangent,
    "vmap": lambda function, along: lambda query: vmap(function)(torch.stack([query, query + along])),
    "jvp(grad)": lambda function, along: tangent(gradient(function), along),
}


def changes_in_training(method: Method) -> bool:
    """True if a forward pass in training changes a buffer."""
    bound = bound_for(method, *qkv(N)).train()
    before = [buffer.clone() for buffer in bound.buffers()]
    bound(*qkv(N), **hidden_for(method, qkv(N)[0]))
    return not all(torch.equal(*pair) for pair in zip(bound.buffers(), before, strict=True))


def second(function: Function, query: Tensor) -> Tensor:
    """The gradient of a sum of the gradient's sines, by reverse mode twice."""
    query = query.clone().requires_grad_()
    (first,) = torch.autograd.grad(function(query).sin().sum(), query, create_graph=True)
    return torch.autograd.grad(first.sin().sum(), query)[0]


def masks_from_tensors(method: Method) -> Iterator[Callable[[], Mask]]:
    """Functions that make masks from tensors that exist already, for the masks that the method supports."""
    valid, lengths = lengths_to_bool([N - 3, N // 2], N, "left"), torch.tensor([N, 7])
    ids = torch.arange(N).expand(2, N) // 9 - 1
    makers: list[Callable[[], Mask]] = [
        Mask,
        lambda: Mask.padding(valid),
        lambda: Mask.padding(keys=lengths, queries=valid),
        lambda: Mask.causal() & Mask.padding(lengths),
        lambda: Mask.segments(ids),
    ]
    return (make for make in makers if method.refuses(make()) is None)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set torch's default dtype inside the block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def results(
    method: Method,
    make_mask: Callable[[], Mask],
    within: Callable[[], AbstractContextManager[object]],
    backend: str = "fastest",
) -> list[Tensor]:
    """The output and the gradients of a call inside a context, whose layer and inputs were made outside of it."""
    leaves = tracked(*qkv(N))
    bound = bound_for(method, *leaves)
    with within(), nullcontext() if backend == "fastest" else sq.use_backend(backend):
        out = bound(*leaves, mask=make_mask(), **hidden_for(method, leaves[0]))
    return [out, *gradients(out, *leaves)]


class TransformsContract(Contract):
    """Every promise about transforms and defaults of torch, one test each."""

    # ------------------------------------------------------------ derivatives and vmap

    def test_forward_mode_gives_the_tangent(self, method: Method):
        function, query, along = attention(method)
        leaf = query.clone().requires_grad_()
        out = function(leaf)
        (wanted,) = gradients(out, leaf)
        weights = normal(*out.shape, seed=99)
        with forward_ad.dual_level():
            dual = forward_ad.unpack_dual(function(forward_ad.make_dual(query, along))).tangent
        if dual is None:  # no query is read
            dual = torch.zeros_like(out)
        close((dual * weights).sum(), (wanted * along).sum(), atol=1e-3, rtol=1e-3)
        close(tangent(function, along)(query), dual, atol=1e-5, rtol=1e-4)

    def test_vmap_equals_a_loop(self, method: Method):
        function, query, along = attention(method)
        several = torch.stack([query, along, query + along])
        close(vmap(function)(several), torch.stack([function(x) for x in several]), atol=1e-5, rtol=1e-4)

    def test_vmap_with_lengths_equals_a_loop(self, method: Method):
        query, key, value = qkv(N, E=8)
        bound = bound_for(method, query, key, value)

        def function(query: Tensor, lengths: Tensor) -> Tensor:
            return bound(query, key, value, mask=Mask.padding(lengths), **hidden_for(method, query))

        several, lengths = torch.stack([query, query + 1]), torch.tensor([[40, 7], [12, 33]])
        wanted = torch.stack([function(*each) for each in zip(several, lengths, strict=True)])
        close(vmap(function)(several, lengths), wanted, atol=1e-5, rtol=1e-4)

    def test_segments_that_vmap_batches_are_masks_or_refused(self, method: Method):
        inputs, ids = qkv(N), torch.arange(N).expand(1, 2, N) // 9
        bound = bound_for(method, *inputs)

        def function(ids: Tensor) -> Tensor:
            return bound(*inputs, mask=Mask.segments(ids), **hidden_for(method, inputs[0]))

        if method.traits.takes_segments:
            close(vmap(function)(ids)[0], function(ids[0]), atol=1e-5, rtol=1e-4)
        else:
            with pytest.raises(ValueError, match="segment ids must be read, but their numbers are not available"):
                vmap(function)(ids)

    @pytest.mark.parametrize("nested", NESTED)
    def test_transforms_inside_vmap_equal_a_loop(self, method: Method, nested: str):
        function, query, along = attention(method)
        each, several = NESTED[nested](function, along), torch.stack([query, query + along])
        close(vmap(each)(several), torch.stack([each(x) for x in several]), atol=1e-4, rtol=1e-3)

    @pytest.mark.parametrize("nested", NESTED)
    @where(lambda traits: traits.learned)
    def test_transforms_of_a_layer_in_training_equal_a_loop_or_are_refused(self, method: Method, nested: str):
        function, query, along = attention(method, training=True)
        each, several = NESTED[nested](function, along), torch.stack([query, query + along])
        if changes_in_training(method):
            with pytest.raises(ValueError, match=r"changes in place in training, but a transform of torch\.func"):
                vmap(each)(several)
        else:
            close(vmap(each)(several), torch.stack([each(x) for x in several]), atol=1e-4, rtol=1e-3)

    @where(lambda traits: traits.learned)
    def test_gradients_of_each_sample_for_the_parameters_equal_a_loop(self, method: Method):
        query, key, value = qkv(N)
        bound = bound_for(method, query, key, value)
        parameters: dict[str, Tensor] = dict(bound.named_parameters())

        def loss(parameters: dict[str, Tensor], query: Tensor) -> Tensor:
            options = hidden_for(method, query)
            return functional_call(bound, parameters, (query, key, value), options).sin().sum()

        several = torch.stack([query, query + 1])
        per_sample, wanted = (
            vmap(grad(loss), (None, 0))(parameters, several),
            [grad(loss)(parameters, x) for x in several],
        )
        for name in parameters:
            close(per_sample[name], torch.stack([each[name] for each in wanted]), atol=1e-4, rtol=1e-3)

    def test_second_derivatives_on_plain_torch_equal_forward_over_reverse(self, method: Method):
        function, query, along = attention(method)
        if not gradients(function(leaf := query.clone().requires_grad_()), leaf)[0].any():
            return  # the queries of this method are not read
        with sq.use_backend("reference"), sdpa_kernel(SDPBackend.MATH):
            twice = second(function, query)
        first = gradient(function)
        _, forward = jvp(lambda query: first(query).sin().sum(), (query,), (along,))
        close((twice * along).sum(), forward, atol=1e-3, rtol=1e-3)

    # ------------------------------------------------------------ tracing

    def test_fake_tensors_give_fake_outputs_and_gradients(self, method: Method):
        with FakeTensorMode():
            inputs = tracked(*(torch.empty(2, 2, N, width) for width in (8, 8, 6)))
            bound = bound_for(method, *inputs)
            mask = Mask.padding(torch.empty(2, N, dtype=torch.bool))
            out = bound(*inputs, mask=mask, **hidden_for(method, inputs[0]))
            assert out.shape == (2, 2, N, 6)
            for leaf, slope in zip(inputs, torch.autograd.grad(out.sum(), inputs, allow_unused=True), strict=True):
                assert slope is None or slope.shape == leaf.shape

    @once
    @pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit.trace itself
    @where(lambda traits: traits.exact_limit != {})
    def test_jit_trace_of_an_approximation_is_refused(self, method: Method):
        inputs = qkv(N)
        with pytest.raises(ValueError, match=r"is not traced by torch\.jit\.trace.*use torch\.export"):
            torch.jit.trace(bound_for(method, *inputs), inputs, check_trace=False)

    # ------------------------------------------------------------ defaults

    def test_the_default_device_changes_nothing(self, method: Method):
        for make in masks_from_tensors(method):
            close(results(method, make, lambda: torch.device("meta")), results(method, make, nullcontext))

    @on_each_backend
    def test_the_default_dtype_changes_nothing(self, method: Method, backend: str):
        for make in masks_from_tensors(method):
            want, have = (
                results(method, make, within, backend) for within in (nullcontext, lambda: default_dtype(torch.float64))
            )
            close(have, want, atol=1e-5, rtol=1e-4)

    @where(lambda traits: traits.learned)
    def test_a_layer_is_made_on_the_device_that_is_named(self, method: Method):
        with torch.device("meta"):
            bound = method.bind(heads=2, head_dim=8, max_length=64, device="cpu")
        assert {x.device.type for x in (*bound.parameters(), *bound.buffers())} == {"cpu"}
        bound = method.bind(heads=2, head_dim=8, max_length=64, device="meta")
        assert {x.device.type for x in (*bound.parameters(), *bound.buffers())} == {"meta"}
