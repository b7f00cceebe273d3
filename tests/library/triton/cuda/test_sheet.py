"""The sheet of a GPU, on one, at small sizes."""

from dataclasses import replace

import pytest
import torch

from subquad.core.environment import gpu_architecture
from subquad.tools.bench.gpu_sheet import Sheet, SheetPlan, fill
from subquad.tools.bench.gpu_timer import GpuTimer
from tests.library.triton.devices import DEVICE


@pytest.fixture(autouse=True)
def tensors_on_the_cpu():
    before = torch.get_default_device()
    torch.set_default_device(None)
    yield
    torch.set_default_device(before)


def test_everything_of_a_small_sheet_is_measured():
    plan = replace(
        SheetPlan(),
        methods=("i-clustered", "clustered-tail"),
        causal_methods=("local",),
        lengths=(1024,),
        widths=(64,),
        device=DEVICE,
    )
    sheet = fill(Sheet(plan, torch.cuda.get_device_name(), gpu_architecture()), GpuTimer(DEVICE), lambda *of: None)
    assert len(sheet.cells) == 2 * 4 + 3  # SDPA's two kernels and two methods, in both passes, and one causal method
    for cell in sheet.cells:
        assert cell.reason is None
        assert cell.eager_ms > 0
        assert cell.graph_ms > 0
        assert cell.peak_mib > 0
    assert {each.kernel for each in sheet.tiles} >= {"members_forward", "cells_to_keys"}
    assert any(each.ms is not None for each in sheet.tiles)


def test_a_timer_measures_work():
    timer, x = GpuTimer(DEVICE), torch.randn(4096, 4096, device=DEVICE)
    few, many = (timer.eager(lambda times=times: [x @ x for _ in range(times)]) for times in (1, 8))
    assert 4 < many / few < 16
    assert timer.graph(lambda: x @ x) == pytest.approx(few, rel=0.5)
    assert timer.kernels(lambda: x @ x) == {}
