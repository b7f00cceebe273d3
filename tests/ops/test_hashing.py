import math

import pytest
import torch

from subquad.ops.hashing import hash_codes, unpack_signs
from tests.oracle import normal


@pytest.mark.parametrize("angle", [0.3, 1.0, 2.0, 3.0])
def test_bits_differ_with_probability_angle_over_pi(angle):
    a = torch.tensor([1.0, 0.0, 0.0])
    b = torch.tensor([math.cos(angle), math.sin(angle), 0.0])
    differing = []
    for seed in range(60):
        codes = hash_codes(torch.stack([a, b])[None, None], 63, seed)
        signs = unpack_signs(codes, 63)[0, 0]
        differing.append((signs[0] != signs[1]).float().mean())
    assert abs(torch.stack(differing).mean() - angle / math.pi) < 0.025


def test_a_bit_is_the_sign_of_its_projection():
    x = normal(2, 3, 5, 4)
    codes = hash_codes(x, 63, seed=1)
    assert torch.equal(unpack_signs(codes, 63).prod(-1).abs(), torch.ones(2, 3, 5))
    assert torch.equal(unpack_signs(hash_codes(-x, 63, seed=1), 63), -unpack_signs(codes, 63))


def test_length_and_dtype_of_a_vector_do_not_matter():
    x = normal(2, 3, 5, 4).bfloat16()
    assert torch.equal(hash_codes(1000 * x.double(), 63, seed=1), hash_codes(x, 63, seed=1))


def test_zero_has_no_bit_set():
    assert hash_codes(torch.zeros(1, 1, 2, 4), 63, seed=0).tolist() == [[[0, 0]]]


@pytest.mark.parametrize("bits", [1, 2, 31, 32, 33, 62, 63])
def test_words_are_not_negative_and_use_their_bits_only(bits):
    codes = hash_codes(normal(1, 1, 200, 4), bits, seed=2)
    assert codes.min() >= 0
    assert int(codes.max()) < 2**bits
    assert set(unpack_signs(codes, bits)[0, 0, :, -1].tolist()) == {-1.0, 1.0}


def test_planes_are_the_same_for_every_item_head_and_length():
    x = normal(1, 1, 5, 4)
    codes = hash_codes(x.expand(3, 2, 5, 4), 20, seed=3)
    assert torch.equal(codes, hash_codes(x[:, :, :2], 20, seed=3).new_tensor(codes[0, 0].tolist()).expand(3, 2, 5))
    assert torch.equal(codes[:1, :1, :2], hash_codes(x[:, :, :2], 20, seed=3))


def test_unpack_reads_the_lowest_bit_first():
    assert unpack_signs(torch.tensor([6]), 4).tolist() == [[-1.0, 1.0, 1.0, -1.0]]


def test_codes_carry_no_gradient():
    assert not hash_codes(normal(1, 1, 5, 4).requires_grad_(), 20, seed=3).requires_grad
