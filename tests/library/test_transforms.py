"""Forward-mode AD, torch.func, tracing and torch's defaults: every method takes part, or states a remedy."""

from zlib import crc32

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functional_call, grad, stack_module_state, vmap

import subquad as sq
import tests.library.test_contract as every
from subquad.testing import TransformsContract
from subquad.testing.contract import bound_for
from subquad.testing.oracle import qkv
from subquad.testing.transforms_contract import second

EXAMPLES = every.TestEveryMethod.examples
VARIANTS = every.TestEveryMethod.methods[len(EXAMPLES) :]


ALWAYS = (
    "test_forward_mode_gives_the_tangent",
    "test_second_derivatives_on_plain_torch_equal_forward_over_reverse",
    "test_transforms_inside_vmap_equal_a_loop",  # of a covering array
    "test_transforms_of_a_layer_in_training_equal_a_loop_or_are_refused",
    "test_vmap_with_lengths_equals_a_loop",
)


class OfTransforms(TransformsContract):
    def is_long(self, test: str, method: sq.Method) -> bool:
        """The derivatives of every method run always, and a third of the cases of the other tests."""
        return test not in ALWAYS and crc32(f"{test} {method}".encode()) % 3 > 0


class TestEveryMethod(OfTransforms):
    pytestmark = pytest.mark.covering(strength=1)
    methods = EXAMPLES


@pytest.mark.long
class TestAllVariants(OfTransforms):
    methods = tuple(VARIANTS)


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


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_traced_program_of_exact_attention_equals_it_at_another_length(unchecked: None):
    bound = sq.Full().bind(heads=2, head_dim=8)
    traced = torch.jit.trace(bound, qkv(40), check_trace=False)
    torch.testing.assert_close(traced(*qkv(33)), bound(*qkv(33)))


@pytest.mark.parametrize("method", ["lha:buckets=4,hidden=8", "routing:clusters=4", "linformer:k=5"])
def test_an_ensemble_of_layers_equals_each_layer(method: str):
    """Also in training, where `vmap` passes the buffers that change, so that each layer changes its own."""
    inputs = qkv(40)
    layers = [bound_for(sq.parse_method(method), *inputs) for _ in range(2)]
    for parameter in layers[1].parameters():
        parameter.data += 0.1
    base = bound_for(sq.parse_method(method), *inputs)
    for training in (False, True):
        parameters, buffers = stack_module_state([layer.train(training) for layer in layers])
        base.train(training)
        out = vmap(lambda p, b: functional_call(base, (p, b), inputs))(parameters, buffers)
        torch.testing.assert_close(out, torch.stack([layer(*inputs) for layer in layers]))


def test_an_auxiliary_loss_that_left_its_vmap_is_refused_by_name():
    query, key, value = qkv(40)
    layer = bound_for(sq.parse_method("lha:buckets=4,hidden=8"), query, key, value).train()

    def loss(query: torch.Tensor) -> torch.Tensor:
        return layer(query, key, value).sum()

    def both(query: torch.Tensor) -> torch.Tensor:
        return layer(query, key, value).sum() + sq.nn.auxiliary_loss(layer)

    vmap(grad(loss))(torch.stack([query, query + 1]))
    with pytest.raises(ValueError, match=r"computed inside torch\.func\.vmap, which has ended"):
        sq.nn.auxiliary_loss(layer)
    several = torch.stack([query, query + 1])
    torch.testing.assert_close(vmap(both)(several), torch.stack([both(x) for x in several]))


def test_kept_tokens_that_vmap_batches_are_refused_by_name():
    query, key, value = qkv(40)
    keep = torch.zeros(3, 2, 40, dtype=torch.bool)
    with pytest.raises(ValueError, match="the bools of `keep` must be read, but their numbers are not available"):
        vmap(lambda keep: sq.attention(query, key, value, method="local:window=4", keep=keep))(keep)


@pytest.mark.parametrize("name", ["linear", "performer:features=16", "rfa:features=96", "linformer:k=5"])
def test_steps_under_vmap_equal_a_loop_or_are_refused(name: str):
    query, key, value = qkv(3)
    layer = bound_for(sq.parse_method(name), query, key, value)
    several = torch.stack([query, query + 1])
    states = [layer.step(x, key, value, layer.init_state(2, like=x, value_dim=6))[1] for x in several]
    together = {part: torch.stack([state[part] for state in states]) for part in states[0]}

    def step(query: torch.Tensor, state: dict[str, torch.Tensor]) -> torch.Tensor:
        return layer.step(query, key, value, state)[0]

    if name.startswith("linformer"):
        with pytest.raises(ValueError, match="the numbers of tokens in the state of 'linformer' must be read"):
            vmap(step)(several, together)
    else:
        wanted = [step(*each) for each in zip(several, states, strict=True)]
        torch.testing.assert_close(vmap(step)(several, together), torch.stack(wanted))


def test_the_compiled_backend_refuses_forward_mode_by_name():
    query, key, value = qkv(40)
    with (
        sq.use_backend("cpu"),
        forward_ad.dual_level(),
        pytest.raises(ValueError, match="inside forward-mode AD, whose tangents custom ops would drop"),
    ):
        sq.attention(forward_ad.make_dual(query, query), key, value, method="i-clustered")
