"""Putting utilities together."""

from subquad.research.papers.experiments.attention_utility import by_head, families


def test_labels_of_several_seeds_are_one_method():
    labels = ["LSH seed=0", "LSH seed=1", "upper bound"]
    assert families(labels) == {"LSH": ["LSH seed=0", "LSH seed=1"], "upper bound": ["upper bound"]}


def test_heads_are_means_over_runs_in_the_order_of_layers():
    runs = [{"10": [1.0, 0.0], "2": [0.5, 0.5]}, {"10": [0.0, 1.0], "2": [0.7, 0.1]}]
    assert by_head(runs) == [[0.6, 0.3], [0.5, 0.5]]
