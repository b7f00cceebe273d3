import math

import pytest
import torch

from subquad.core.randomness import orthogonal
from subquad.kernels.dispatch import use_backend
from subquad.kernels.selection.hashing.op import hash_codes, unpack_signs
from subquad.kernels.selection.hashing.reference import centred
from subquad.testing.oracle import normal

pytestmark = pytest.mark.usefixtures("implementation")


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_length_and_dtype_of_a_vector_do_not_matter(dtype):
    x = normal(2, 3, 5, 4).bfloat16()
    with use_backend("reference"):
        want = hash_codes(1024 * x.to(dtype), 63, seed=1)
    assert torch.equal(hash_codes(x, 63, seed=1), want)


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


@pytest.mark.parametrize("centre", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_all_implementations_agree_but_where_a_projection_is_nearly_zero(centre, dtype):
    x = (normal(2, 3, 2100, 24) + 2).to(dtype)
    valid = normal(2, 2100) > -0.5
    have = hash_codes(x, 63, seed=5, centre=centre, valid=valid)
    with use_backend("reference"):
        want = hash_codes(x, 63, seed=5, centre=centre, valid=valid)
    differing = unpack_signs(have, 63) != unpack_signs(want, 63)
    assert not differing[~valid[:, None].expand(2, 3, -1)].any()
    vectors = centred(x, valid) if centre else x.float()
    projections = vectors @ orthogonal(5, 63, 24, like=vectors).T
    assert differing.float().mean() < 1e-4
    assert (projections[differing].abs() < 1e-5).all()


def test_centring_takes_a_common_offset_away_and_nothing_of_pads():
    x, offset = normal(1, 2, 40, 8), 8 * normal(1, 2, 1, 8, seed=1).round()
    valid = torch.arange(40)[None] % 3 > 0
    plain = hash_codes(x, 63, seed=0, centre=True, valid=valid)
    moved = hash_codes(torch.where(valid[:, None, :, None], x, 1e4) + offset, 63, seed=0, centre=True, valid=valid)
    same = unpack_signs(plain, 63) == unpack_signs(moved, 63)
    assert same.float().mean() > 0.999  # rounding of the offset sum may turn a bit
    assert (plain.mT[~valid] == 0).all()
    assert not torch.equal(plain, hash_codes(x + offset, 63, seed=0, valid=valid))
