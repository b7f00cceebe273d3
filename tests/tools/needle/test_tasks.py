"""The tasks: what the facts say, and which answer follows from them alone."""

import random
import re

import pytest

from subquad.tools.needle.settings import NeedleSettings
from subquad.tools.needle.tasks import CHAIN, COUNTS, KEYS, TASKS


def made(task, depth=0.3, seed=0):
    return TASKS[task].make(random.Random(seed), depth)


def test_the_command_offers_every_task():
    assert NeedleSettings().tasks == tuple(TASKS) == ("passkey", "keys", "variables", "frequent")


@pytest.mark.parametrize("task", TASKS)
def test_puzzles_come_from_the_seed(task):
    assert made(task) == made(task)
    assert made(task).answer != made(task, seed=1).answer


@pytest.mark.parametrize("task", TASKS)
def test_the_depth_moves_facts_and_changes_nothing_else(task):
    near, far = made(task, 0.9), made(task, 0.1)
    assert [fact for _, fact in near.needles] == [fact for _, fact in far.needles]
    assert (near.question, near.answer) == (far.question, far.answer)
    assert (near.needles == far.needles) == TASKS[task].spread


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("seed", range(5))
def test_depths_are_inside_the_text(task, seed):
    assert all(0 <= depth <= 1 for where in (0.0, 1.0) for depth, _ in made(task, where, seed).needles)


def test_the_passkey_is_the_answer():
    puzzle = made("passkey")
    assert [depth for depth, _ in puzzle.needles] == [0.3]
    assert puzzle.needles[0][1].count(puzzle.answer.strip()) == 2


@pytest.mark.parametrize("seed", range(5))
def test_one_of_several_keys_has_the_name_that_is_asked_for(seed):
    puzzle = made("keys", seed=seed)
    name = re.search(r"What is the (\w+) key", puzzle.question).group(1)
    values = dict(re.search(r"The (\w+) key is: (\d+)", fact).groups() for _, fact in puzzle.needles)
    assert len(values) == KEYS == len(set(values.values()))
    assert puzzle.answer == f" {values[name]}"
    assert [depth for depth, fact in puzzle.needles if f"The {name} key" in fact] == [0.3]


@pytest.mark.parametrize("seed", range(5))
def test_the_chain_of_the_variable_ends_at_the_answer(seed):
    puzzle = made("variables", seed=seed)
    values = dict(re.search(r"variable (X\d+) is: (\w+)\.", fact).groups() for _, fact in puzzle.needles)
    assert len(values) == 2 * CHAIN
    asked = re.search(r"the variable (X\d+)\?", puzzle.question).group(1)
    names = [asked]
    while names[-1] in values:
        names.append(values[names[-1]])
    assert len(names) == CHAIN + 1
    assert puzzle.answer == f" {names[-1]}"
    depths = {re.search(r"X\d+", fact).group(): depth for depth, fact in puzzle.needles}
    chain = [depths[name] for name in reversed(names[:-1])]
    assert chain[0] == 0.3
    assert chain == sorted(chain)


@pytest.mark.parametrize("seed", range(5))
def test_the_most_frequent_word_is_the_answer(seed):
    puzzle = made("frequent", seed=seed)
    words = [re.search(r"is: (\w+)", fact).group(1) for _, fact in puzzle.needles]
    counts = sorted((words.count(word) for word in set(words)), reverse=True)
    assert counts == list(COUNTS)
    assert words.count(puzzle.answer.strip()) == COUNTS[0]
