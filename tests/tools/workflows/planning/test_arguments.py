"""Marks of a plan's settings and inputs, by which an interrupted run is recognised."""

from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch

from subquad.tools.measure.group import ALONE
from subquad.tools.plan.arguments import mark_of_function, mark_of_inputs
from subquad.tools.plan.run import ELSEWHERE, fingerprint
from subquad.tools.plan.settings import PlanSettings

TENSORS = {
    "a scalar": torch.tensor(3.0),
    "one element of a strided tensor": torch.arange(1.0, 8.0)[::5][:1],
    "one column of a row": torch.arange(1, 6)[None][:, ::5],
    "transposed": torch.arange(12).view(3, 4).T,
    "expanded": torch.arange(3).expand(4, 3),
    "empty": torch.empty(0, 3),
    "bfloat16": torch.tensor([1.0, -2.0], dtype=torch.bfloat16),
    "bool": torch.tensor([[True], [False]]),
    "conjugated": torch.tensor([1 + 2j, 3 - 1j]).conj(),
    "negated": torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
    "with a gradient": torch.ones(2, requires_grad=True),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_has_the_mark_of_its_values_whatever_its_layout(name):
    tensor = TENSORS[name]
    same = torch.tensor(tensor.tolist(), dtype=tensor.dtype).reshape(tensor.shape)
    assert mark_of_inputs([{"x": tensor}]) == mark_of_inputs([{"x": same}])
    if tensor.numel():
        assert mark_of_inputs([{"x": tensor}]) != mark_of_inputs([{"x": torch.zeros_like(same)}])


def test_marks_differ_by_name_dtype_and_shape():
    values = torch.arange(4)
    inputs = [{"x": values}, {"y": values}, {"x": values.float()}, {"x": values[None]}, {"x": [0, 1, 2, 3]}]
    assert len({mark_of_inputs([one]) for one in inputs}) == len(inputs)


@pytest.mark.parametrize("wrap", [lambda x: [x], lambda x: (0, {"a": x}), lambda x: x.numpy(), lambda x: [x.numpy()]])
def test_marks_differ_by_what_is_inside_of_containers_and_arrays(wrap):
    first, second = torch.zeros(2000), torch.zeros(2000)
    second[1000] = 1.0  # where the text of a long tensor has "..."
    assert mark_of_inputs([{"x": wrap(first)}]) == mark_of_inputs([{"x": wrap(first.clone())}])
    assert mark_of_inputs([{"x": wrap(first)}]) != mark_of_inputs([{"x": wrap(second)}])


@pytest.mark.parametrize(("first", "second"), [
    ("lambda o, x: sum(1.0 for t in o)", "lambda o, x: sum(2.0 for t in o)"),
    ("lambda o, x: o in (1, 2)", "lambda o, x: o in (1, 3)"),
    ("lambda o, x: o in {1, 2}", "lambda o, x: o in {1, 3}"),
    ("lambda o, x, w=(1, 2): w[0]", "lambda o, x, w=(5, 2): w[0]"),
    ("lambda o, x, *, w=1: w", "lambda o, x, *, w=2: w"),
])  # fmt: skip
def test_functions_differ_by_nested_code_constants_and_defaults(first, second):
    assert mark_of_function(eval(first)) == mark_of_function(eval(first)) != mark_of_function(eval(second))


def test_a_default_that_is_no_constant_does_not_change_the_mark():
    first, second = (eval("lambda o, x, w=thing: w", {"thing": object()}) for _ in range(2))
    assert mark_of_function(first) == mark_of_function(second)


def test_a_run_is_recognised_by_each_setting_whose_results_do_not_mark_it(unchecked):
    load = SimpleNamespace(length=512, items=[], held_out=[], batches=None, group=ALONE)
    facts = {"identity": "a model", "text": "a text"}

    def mark(**settings):
        return fingerprint([load], lambda length: [], PlanSettings(**settings), facts)

    names = {field.name for field in fields(PlanSettings)}
    assert names > ELSEWHERE
    for name in sorted(names - ELSEWHERE):
        assert mark(**{name: 3}) != mark(**{name: 4}), name
    assert mark(minutes=3.0) == mark()
