"""What a device multiplies, by the processor's capabilities."""

import pytest

from subquad.tools.models import dtypes


@pytest.mark.parametrize(
    ("capabilities", "device", "dtype", "products", "tiles"),
    [
        ({"avx512_bf16": True, "amx_bf16": True}, "cpu", "bf16", True, True),
        ({"avx512_bf16": True, "amx_bf16": True, "amx_fp16": False}, "cpu", "fp16", False, False),
        ({"avx512_bf16": True}, "cpu", "bf16", True, False),
        ({"avx512_bf16": False, "amx_bf16": False}, "cpu", "bf16", False, False),
        ({}, "cpu", "fp32", True, False),
        ({"amx_bf16": True}, "cuda:0", "bf16", True, False),
    ],
)
def test_products_and_tiles_of_a_device(monkeypatch, capabilities, device, dtype, products, tiles):
    monkeypatch.setattr(dtypes, "cpu_capabilities", lambda: capabilities)
    assert dtypes.has_products(device, dtype) is products
    assert dtypes.has_tiles(device, dtype) is tiles
