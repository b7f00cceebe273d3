"""The same seed, the same numbers; nobody else's generator."""

import torch

from subquad.core import randomness
from subquad.core.randomness import gumbel, normal, orthogonal, uniform

LIKE = torch.zeros(1)


def test_the_seed_decides():
    assert torch.equal(orthogonal(7, 3, 4, LIKE), orthogonal(7, 3, 4, LIKE))
    assert not torch.equal(orthogonal(7, 3, 4, LIKE), orthogonal(8, 3, 4, LIKE))


def test_the_global_generator_is_left_alone():
    torch.manual_seed(3)
    state, first = torch.get_rng_state(), orthogonal(7, 3, 4, LIKE)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(4)
    assert torch.equal(orthogonal(7, 3, 4, LIKE), first)


def test_rows_are_orthonormal_in_runs():
    x = orthogonal(0, 10, 4, LIKE.double())
    assert x.shape == (10, 4)
    for start in (0, 4, 8):
        block = x[start : start + 4]
        torch.testing.assert_close(block @ block.T, torch.eye(len(block), dtype=torch.float64))


def test_directions_are_uniform():
    """Without the sign of R's diagonal the first coordinate of the first row would always have one sign."""
    rows = torch.stack([orthogonal(seed, 3, 3, LIKE.double()) for seed in range(2000)])
    assert rows.mean(0).abs().max() < 0.06  # standard error 0.013
    torch.testing.assert_close((rows**2).mean(0), torch.full((3, 3), 1 / 3, dtype=torch.float64), atol=0.03, rtol=0)


def test_dtype_follows_and_only_rounds():
    double = orthogonal(0, 3, 4, LIKE.double())
    assert double.dtype == torch.float64
    assert torch.equal(orthogonal(0, 3, 4, LIKE), double.float())


def test_what_was_drawn_is_kept_and_handed_out_as_a_copy():
    for draw in (orthogonal, normal):
        first = draw(7, 3, 4, LIKE)
        want = first.clone()
        first.zero_()
        assert torch.equal(draw(7, 3, 4, LIKE), want)


def test_the_custom_op_is_well_formed():
    torch.library.opcheck(torch.ops.subquad.orthogonal.default, (7, 3, 4, torch.float32, torch.device("cpu")))


def test_normal_numbers_of_two_seeds_have_no_row_in_common():
    """Nor has a row of one seed the numbers of another row."""
    rows = torch.cat([normal(seed, 40, 3, LIKE.double()) for seed in range(40)])
    assert len(rows.unique(dim=0)) == 1600
    assert len(rows.unique()) == 4800


def test_normal_numbers_are_normal():
    rows = normal(3, 20000, 4, LIKE.double())
    assert rows.mean(0).abs().max() < 0.03  # standard error 0.007
    torch.testing.assert_close(rows.T.cov(), torch.eye(4, dtype=torch.float64), atol=0.04, rtol=0)
    assert ((rows.abs() < 0.6745).double().mean(0) - 0.5).abs().max() < 0.015


def test_uniform_numbers_of_two_seeds_or_places_have_nothing_in_common():
    rows, columns = torch.arange(30)[:, None], torch.arange(30)
    drawn = torch.stack([uniform(seed, rows, columns) for seed in range(3)])
    assert len(drawn.unique()) == 2700
    assert abs(drawn.mean() - 0.5) < 0.03  # standard error 0.006
    assert torch.equal(drawn[1, :5, 7], uniform(1, rows[:5, 0], torch.tensor(7)))


def test_gumbel_numbers_of_two_seeds_have_no_step_in_common():
    places = torch.arange(5)
    drawn = [gumbel(seed, torch.tensor(step), places, LIKE.double()) for seed in range(20) for step in range(20)]
    assert len(torch.stack(drawn).unique()) == 2000


def test_of_redraws_the_last_is_kept():
    caches = randomness._kept, randomness._drawn, randomness._normal_drawn
    before = [cache.cache_info().currsize for cache in caches]
    for number in range(1, 20):
        draws = [randomness.directions(3, torch.tensor(number), 5, 4, False, LIKE) for _ in range(2)]
        assert torch.equal(*draws)
    assert [cache.cache_info().currsize for cache in caches] == before
    last = randomness._last_of(3, 5, 4, False, LIKE.dtype, LIKE.device)
    assert list(last) == [19]
    assert torch.equal(draws[0], randomness.directions(22, None, 5, 4, False, LIKE))
