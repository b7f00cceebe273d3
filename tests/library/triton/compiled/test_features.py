import pytest
import torch

from subquad.kernels.attention.features.op import feature_attention
from subquad.kernels.attention.products.op import causal_product
from tests.library.triton.compiled.fits import assert_fits, meta


@pytest.mark.parametrize(
    ("dtype", "D"),
    [
        (torch.bfloat16, 64),
        pytest.param(torch.bfloat16, 128, marks=pytest.mark.long),
        pytest.param(torch.float32, 64, marks=pytest.mark.long),
        (torch.float32, 128),
    ],
    ids=str,
)
@pytest.mark.parametrize("causal", [False, True])
def test_features(dtype, D, causal):
    """Both directions, with projections to 256 features and a bias of keys; causal ones have what full ones have."""
    inputs = [meta(1, 32, 4096, D, dtype=dtype, grad=True) for _ in range(3)]
    rows, bias = meta(1, 256, D, dtype=torch.float32), meta(1, 1, 4096, dtype=torch.float32)

    def call():
        out, _ = feature_attention(*inputs, of_query=rows, of_key=rows, key_bias=bias, causal=causal)
        out.sum().backward()

    names = {launch.name for launch in assert_fits(call)}
    of_states = {"sum_chunks", "scan", "read_states", "query_slopes", "key_slopes"}
    assert names == of_states | ({"read_chunks", "chunk_slopes", "chunk_values"} if causal else set())


@pytest.mark.parametrize(("R", "E"), [(128, 64), pytest.param(256, 128, marks=pytest.mark.long)])
def test_causal_products(R, E):
    shapes = (1, 32, 4096, R), (1, 32, 4096, R), (1, 32, 4096, E)
    inputs = [meta(*shape, dtype=torch.float32, grad=True) for shape in shapes]
    launches = assert_fits(lambda: causal_product(*inputs).sum().backward())
    assert [launch.name for launch in launches] == ["sum_products", "scan_products", "read_products"] * 4
