import torch

from subquad.randomness import gaussian

LIKE = torch.zeros(1)


def test_same_seed_same_numbers_another_seed_others():
    assert torch.equal(gaussian(7, 3, 4, LIKE), gaussian(7, 3, 4, LIKE))
    assert not torch.equal(gaussian(7, 3, 4, LIKE), gaussian(8, 3, 4, LIKE))


def test_the_global_generator_is_neither_read_nor_moved():
    torch.manual_seed(1)
    state, first = torch.get_rng_state(), gaussian(7, 3, 4, LIKE)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(gaussian(7, 3, 4, LIKE), first)


def test_the_numbers_are_standard_normal():
    x = gaussian(0, 200, 200, torch.zeros(1, dtype=torch.float64))
    assert abs(x.mean()) < 0.02
    assert abs(x.std() - 1) < 0.02
    assert abs((x.abs() < 1).double().mean() - 0.6827) < 0.01


def test_dtype_follows_and_the_numbers_do_not_change_with_it():
    double = gaussian(0, 3, 4, LIKE.double())
    assert double.dtype == torch.float64
    assert torch.equal(gaussian(0, 3, 4, LIKE), double.float())


def test_fake_tensors_know_shape_and_dtype():
    torch.library.opcheck(torch.ops.subquad.gaussian.default, (7, 3, 4))
    assert gaussian(7, 3, 4, LIKE).shape == (3, 4)
