import os

import pytest
import torch

import subquad  # noqa: F401  (before the default device is another: what it makes when it is imported is on the CPU)
from tests.library.triton.devices import DEVICE, MISSING, ON_GPU
from tests.library.triton.processes import CHOSEN, FOLDERS, KINDS

collect_ignore = [folder for folder in FOLDERS if folder not in KINDS.get(os.environ.get(CHOSEN, ""), ())]

if ON_GPU and MISSING is None:  # before the test modules are imported, some of which hold tensors
    torch.set_default_device(DEVICE)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items if ON_GPU else []:
        item.add_marker(pytest.mark.cuda)
        if MISSING is not None:
            item.add_marker(pytest.mark.skip(reason=MISSING))
