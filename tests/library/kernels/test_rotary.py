"""Rotary positions: vectors as they would be some positions later."""

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from subquad.kernels.tokens.rotary import Rotary

FREQUENCIES = 10_000.0 ** -(torch.arange(8) / 8)


def vectors(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(0))


def by_complex_numbers(x, frequencies, positions):
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
    factors = torch.polar(torch.ones(len(frequencies)).double(), positions * frequencies.double())
    return torch.view_as_real(pairs * factors).flatten(-2).to(x.dtype)


@pytest.mark.parametrize("positions", [1, 7, 1000, -3])
def test_halves_are_turned_as_transformers_turns_them(positions):
    x = vectors(2, 3, 5, 16)
    angles = (positions * FREQUENCIES.double()).repeat(2)[None, None]
    want, _ = apply_rotary_pos_emb(x.double(), x.double(), angles.cos(), angles.sin())
    torch.testing.assert_close(Rotary(FREQUENCIES).turned(x, positions), want.float())


@pytest.mark.parametrize("positions", [1, 7, 1000, -3])
def test_neighbours_are_turned_as_complex_numbers(positions):
    x = vectors(2, 3, 5, 16)
    turned = Rotary(FREQUENCIES, interleaved=True).turned(x, positions)
    torch.testing.assert_close(turned, by_complex_numbers(x, FREQUENCIES, positions))


@pytest.mark.parametrize("interleaved", [False, True])
def test_two_distances_are_their_sum(interleaved):
    rotary, x = Rotary(FREQUENCIES, interleaved), vectors(4, 20)
    torch.testing.assert_close(rotary.turned(rotary.turned(x, 3), 4), rotary.turned(x, 7))
    torch.testing.assert_close(rotary.turned(rotary.turned(x, 5), -5), x)


@pytest.mark.parametrize("interleaved", [False, True])
def test_products_depend_on_the_distance_alone(interleaved):
    rotary, x, y = Rotary(FREQUENCIES, interleaved), vectors(16), vectors(2, 16)[1]
    products = [rotary.turned(x, p) @ rotary.turned(y, p - 6) for p in (6, 50, 300)]
    torch.testing.assert_close(torch.stack(products), products[0].expand(3), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("interleaved", [False, True])
def test_components_without_a_frequency_stay(interleaved):
    rotary, x = Rotary(FREQUENCIES, interleaved), vectors(2, 21)
    turned = rotary.turned(x, 9)
    assert turned.shape == x.shape
    assert torch.equal(turned[..., 16:], x[..., 16:])
    torch.testing.assert_close(turned[..., :16], rotary.turned(x[..., :16], 9))


def test_nothing_is_turned_by_no_distance_or_no_frequency():
    x = vectors(2, 16)
    assert Rotary(FREQUENCIES).turned(x, 0) is x
    assert Rotary(torch.zeros(0)).turned(x, 5) is x


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("width", [16, 24])
def test_the_dtype_is_kept(dtype, width):
    x = vectors(4, width, dtype=dtype)
    turned = Rotary(FREQUENCIES).turned(x, 11)
    assert turned.dtype == dtype
    torch.testing.assert_close(turned, Rotary(FREQUENCIES).turned(x.double(), 11).to(dtype))


def test_angles_of_distant_positions_are_exact():
    rotary, x = Rotary(FREQUENCIES.double()), vectors(16, dtype=torch.float64)
    distant = Rotary(FREQUENCIES.double()).turned(x, 1_000_003)
    torch.testing.assert_close(rotary.turned(distant, -1_000_000), rotary.turned(x, 3))


def test_gradients_flow_through():
    x = vectors(3, 16, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: Rotary(FREQUENCIES, interleaved=True).turned(x, 5), (x,))


@pytest.mark.usefixtures("unchecked")
def test_frequencies_are_one_axis_of_floating_numbers():
    for frequencies in (torch.ones(2, 2, 2), torch.arange(3), torch.tensor(1.0)):
        with pytest.raises(ValueError, match="one for each pair"):
            Rotary(frequencies)


def test_more_pairs_than_components_are_refused():
    with pytest.raises(ValueError, match="NaN or infinity"):
        Rotary(torch.tensor([1.0, torch.nan]))
    with pytest.raises(TypeError, match="frequencies"):
        Rotary([1.0, 0.1])
    with pytest.raises(ValueError, match="8 frequencies turn 16 components, but the vectors have 12"):
        Rotary(FREQUENCIES).turned(vectors(2, 12), 1)


def test_a_rotary_on_its_device_is_itself():
    rotary = Rotary(FREQUENCIES, interleaved=True)
    assert rotary.to(torch.device("cpu")) is rotary
    moved = rotary.to(torch.device("meta"))
    assert moved.frequencies.device.type == "meta"
    assert moved.interleaved
