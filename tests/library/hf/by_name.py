"""Models that have a method by name, `attn_implementation="subquad:…"`."""

import copy

from tests.library.hf.models import Case

SPEC = "i-clustered:clusters=3,topk=2"
NAME = f"subquad:{SPEC}"
HALVES = "clustered:clusters=4,bits=15,iterations=3,block=8,last=2"


def named(case: Case, name: str) -> Case:
    """The case with another model, which was made from a config that has the name, and has the same weights."""
    config = copy.deepcopy(case.model.config)
    config._attn_implementation = name
    model = type(case.model)(config).eval()
    model.load_state_dict(case.model.state_dict())
    case.model = model
    return case
