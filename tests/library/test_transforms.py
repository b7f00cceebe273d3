"""Forward-mode AD, torch.func and second derivatives: every method takes part, or says what to do instead."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

import subquad as sq
from subquad.testing.contract import bound_for
from subquad.testing.oracle import normal, qkv

METHODS = [cls(**cls.traits.example) for cls in sq.methods.METHODS.values()]
every_method = pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)

close = torch.testing.assert_close


def attention(method):
    """A method as a function of the query alone, the query, and a direction."""
    query, key, value = qkv(40, E=8)
    runs = bound_for(method, query, key, value) if method.traits.learned else method
    return lambda query: runs(query, key, value), query, normal(*query.shape, seed=9)


def tangent_by_reverse_mode(function, query, along):
    """The tangent times the numbers of its own shape, from the gradient."""
    query = query.clone().requires_grad_()
    out = function(query)
    weights = normal(*out.shape, seed=11)
    (grad,) = torch.autograd.grad(out, query, weights)
    return (grad * along).sum(), weights


@every_method
def test_forward_mode_gives_the_tangent(method):
    function, query, along = attention(method)
    wanted, weights = tangent_by_reverse_mode(function, query, along)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(function(forward_ad.make_dual(query, along))).tangent
    assert tangent is not None
    close((tangent * weights).sum(), wanted, atol=1e-3, rtol=1e-3)
    close(torch.func.jvp(function, (query,), (along,))[1], tangent, atol=1e-5, rtol=1e-4)


@every_method
def test_vmap_equals_a_loop(method):
    function, query, along = attention(method)
    several = torch.stack([query, along, query + along])
    close(torch.func.vmap(function)(several), torch.stack([function(x) for x in several]), atol=1e-5, rtol=1e-4)


@every_method
def test_vmap_with_lengths_equals_a_loop(method):
    query, key, value = qkv(40, E=8)
    runs = bound_for(method, query, key, value) if method.traits.learned else method

    def function(query, lengths):
        return runs(query, key, value, mask=sq.Mask.padding(lengths))

    several, lengths = torch.stack([query, query + 1]), torch.tensor([[40, 7], [12, 33]])
    wanted = [function(*each) for each in zip(several, lengths, strict=True)]
    close(torch.func.vmap(function)(several, lengths), torch.stack(wanted), atol=1e-5, rtol=1e-4)


def second(function, query):
    """The gradient of a sum of the gradient's sines, by reverse mode twice."""
    query = query.clone().requires_grad_()
    (grad,) = torch.autograd.grad(function(query).sin().sum(), query, create_graph=True)
    return torch.autograd.grad(grad.sin().sum(), query)[0]


@every_method
def test_second_derivatives_on_plain_torch_equal_forward_over_reverse(method):
    function, query, along = attention(method)
    with sq.use_backend("reference"), sdpa_kernel(SDPBackend.MATH):
        twice = second(function, query)
    grad = torch.func.grad(lambda query: function(query).sin().sum())
    _, forward = torch.func.jvp(lambda query: grad(query).sin().sum(), (query,), (along,))
    close((twice * along).sum(), forward, atol=1e-3, rtol=1e-3)


@pytest.mark.skipif(
    "cpu" not in [n for n, s in sq.backends().items() if s == "available"], reason="no compiled library"
)
@pytest.mark.parametrize("method", ["clustered", "i-clustered", "lsh", "local", "performer", "linear"])
def test_a_second_derivative_in_compiled_code_names_the_remedy(method):
    query, key, value = qkv(200)
    with pytest.raises(
        NotImplementedError, match=r"with sq\.use_backend\('reference'\), torch\.nn\.attention\.sdpa_kernel"
    ):
        second(lambda query: sq.attention(query, key, value, method=method), query)


def test_the_compiled_backend_refuses_forward_mode_by_name():
    query, key, value = qkv(40)
    with (
        sq.use_backend("cpu"),
        forward_ad.dual_level(),
        pytest.raises(ValueError, match="inside forward-mode AD, whose tangents custom ops would drop"),
    ):
        sq.attention(forward_ad.make_dual(query, query), key, value, method="i-clustered")
