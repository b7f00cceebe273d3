"""In CI the kernels are compiled in bf16 with vectors of 64 for one GPU: compiling takes about a second each.

All of them: SUBQUAD_ALL_CHIPS=1 python -m tests.library.triton compiled -m ""
"""

import pytest
import torch


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        given = item.callspec.params if hasattr(item, "callspec") else {}
        if given.get("D", 64) != 64 or given.get("dtype") == torch.float32:
            item.add_marker(pytest.mark.long)
