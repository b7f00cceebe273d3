"""Examples in passes, each in an order of its own."""

from subquad.research.training.order import Order


def test_each_pass_has_every_example_once_in_another_order():
    order = list(Order(10, 25, seed=3))
    assert sorted(order[:10]) == sorted(order[10:20]) == list(range(10))
    assert order[:10] != order[10:20]
    assert len(set(order[20:])) == 5


def test_it_depends_on_the_seed_alone_and_a_longer_run_begins_alike():
    assert list(Order(10, 25, seed=3)) == list(Order(10, 40, seed=3))[:25]
    assert list(Order(10, 25, seed=3)) != list(Order(10, 25, seed=4))
    assert len(Order(10, 25, seed=3)) == 25
