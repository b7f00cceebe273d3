"""The arithmetic of the GPU cost model; what it records is tested with the compiled kernels."""

import pytest

from subquad.tools.measure import gpu_model as model
from subquad.tools.measure.gpu_chips import GPUS, between, gpu_named
from subquad.tools.measure.gpu_model import GAP, GpuLoad, GpuStep, Recorded, captured, eager, exact, holding

H100 = GPUS["H100"]


def test_a_launch_takes_what_its_slowest_part_takes():
    products = GpuStep("a", products=10**12, bytes=1, programs=10**6)
    assert products.device(H100) == pytest.approx(2e12 / (989.4e12 * model.OF_PEAK) + GAP)
    moved = GpuStep("b", products=1, bytes=10**10, programs=10**6)
    assert moved.device(H100) == pytest.approx(1e10 / (3350e9 * model.OF_BANDWIDTH) + GAP)
    sorted_ = GpuStep("sort", bytes=1, keys=3.3e9, kernels=10)
    assert sorted_.device(H100) == pytest.approx(1.0 + 10 * GAP)


def test_products_of_fp32_take_longer():
    narrow, ours, torchs = (
        GpuStep("a", products=10**15, programs=10**6, kind=kind).device(H100) - GAP
        for kind in ("16 bits", "tf32x3", "fp32")
    )
    assert ours / narrow == pytest.approx(6)
    assert torchs / narrow == pytest.approx(989.4 / 66.9)


def test_few_programs_use_a_share_of_the_gpu():
    full, third = (GpuStep("a", products=10**12, programs=programs).device(H100) - GAP for programs in (132, 44))
    assert third == pytest.approx(3 * full)
    assert GpuStep("a", products=10**12).device(H100) - GAP == pytest.approx(full)  # a call of torch fills it


def test_without_a_graph_the_host_may_be_slower():
    small = [GpuStep("ours", programs=1), GpuStep("torch's")]
    assert captured(small, H100) == pytest.approx(2 * GAP)
    assert eager(small, H100) == pytest.approx(model.TRITON_LAUNCH + model.TORCH_CALL)
    large = [GpuStep("ours", products=10**13, programs=10**6)]
    assert eager(large, H100) == captured(large, H100)


def test_what_holds_is_told_by_name_over_all_launches():
    steps = [GpuStep("a", bytes=10**9), GpuStep("b", bytes=2 * 10**9), GpuStep("a", bytes=2 * 10**9)]
    (first, share), (second, _) = holding(steps, H100)
    assert (first, second) == ("a", "b")
    assert share == pytest.approx(0.6, abs=0.01)


def test_the_passes_of_a_record():
    record = Recorded([GpuStep("a")], [GpuStep("b")])
    assert [step.name for step in record.steps("forward")] == ["a"]
    assert [step.name for step in record.steps("forward+backward")] == ["a", "b"]


def test_exact_attention_is_as_published():
    load = GpuLoad(16384, heads=16, width=128)
    assert exact(H100, load, "forward") == pytest.approx(4 * 16 * 16384**2 * 128 / 621e12)
    assert exact(H100, load, "forward", "FlashAttention-2") > exact(H100, load, "forward")
    both = exact(H100, load, "forward+backward") / exact(H100, load, "forward")
    assert both == pytest.approx(1 + model.BACKWARD / model.OF_FORWARD)


def test_a_curve_is_linear_between_its_points_and_constant_outside():
    curve = {10: 1.0, 20: 3.0}
    assert [between(curve, at) for at in (5, 10, 15, 20, 99)] == [1.0, 1.0, 2.0, 3.0, 3.0]


@pytest.mark.parametrize("gpu", GPUS.values(), ids=lambda gpu: gpu.name)
def test_every_gpu_has_exact_attention_at_both_widths(gpu):
    for named in gpu.exact:
        for width in (64, 128):
            assert 0.1 * gpu.peak < gpu.exact_throughput(named, width, 4096) < gpu.peak


def test_other_widths_are_as_the_next_wider_one():
    at = [H100.exact_throughput("FlashAttention-3", width, 4096) for width in (32, 64, 65, 128, 256)]
    assert at == [476.0, 476.0, 590.0, 590.0, 590.0]


@pytest.mark.parametrize(
    ("device", "name"),
    [("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA A100-SXM4-80GB", "A100"), ("AMD Instinct MI300X", "MI300X")],
)
def test_a_gpu_is_found_by_its_devices_name(device, name):
    assert gpu_named(device).name == name


def test_another_gpu_has_no_figures():
    assert gpu_named("NVIDIA GeForce GTX 1080") is None
