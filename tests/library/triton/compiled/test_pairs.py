import pytest
import torch

from subquad.kernels.attention.pairs.op import attend_pairs
from subquad.kernels.tokens.slots import Buckets
from subquad.kernels.triton.recording import Launch, recording
from subquad.masks import Mask
from tests.library.triton.compiled.fits import assert_fits, meta

B, H, N = 1, 32, 4096


def balanced(K: int = 90) -> Buckets:
    """64 buckets of `K` queries and keys."""
    return Buckets(*(meta(B, H, 64, K, dtype=torch.int64) for _ in "qk"))


def shared() -> Buckets:
    """Blocks of 32 queries, several of which share a bucket of 90 keys."""
    return Buckets(*(meta(B, H, *shape, dtype=torch.int64) for shape in ((192, 32), (64, 90), (192,))))


def both_directions(dtype: torch.dtype, D: int, buckets: tuple[Buckets, ...], mask: Mask, **options: object) -> None:
    """Forward, and the gradients of all inputs."""
    inputs = [meta(B, heads, N, D, dtype=dtype, grad=True) for heads in (H, H // 4, H // 4)]
    out, lse = attend_pairs(*inputs, buckets, mask, scale=0.3, **options)
    (out.sum() + lse.sum()).backward()


def named(launches: list[Launch]) -> list[str]:
    return [launch.name for launch in launches if launch.name not in ("members_of_run", "order_members")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_causal_buckets(dtype):
    launches = assert_fits(lambda: both_directions(dtype, 64, (balanced(),), Mask.causal()))
    assert named(launches) == [
        "attend_tile",
        "merge_tile",
        "gradient_of_queries",
        "gradient_of_keys",
        "sum_tile",
        "sum_tile",
        "sum_tile",
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_every_option_and_wider_vectors(dtype):
    bias = meta(B, H, N, dtype=dtype, grad=True)
    mask = Mask.window(7) & Mask.causal(offset=torch.empty(1, dtype=torch.int64, device="meta"))
    more = {"key_bias": bias, "hidden": meta(B, H, 3, N, dtype=torch.bool), "other_keys_only": True}
    assert_fits(lambda: both_directions(dtype, 128, (shared(),), mask, **more))


def test_tokens_that_meet_themselves_alone():
    alone = Buckets(*[meta(B, H, N, 1, dtype=torch.int64)] * 2)
    bias = meta(B, H, N, dtype=torch.float32, grad=True)
    launches = assert_fits(lambda: both_directions(torch.float32, 128, (alone,), Mask.causal(), key_bias=bias))
    assert named(launches)[:3] == ["attend_pair", "merge_tile", "gradient_of_pair"]


def test_a_launch_a_set_and_one_merge_for_all():
    with recording() as launches:
        both_directions(torch.bfloat16, 64, (balanced(), shared()), Mask())
    assert named(launches).count("attend_tile") == named(launches).count("gradient_of_keys") == 2
    assert named(launches).count("merge_tile") == 1
    assert sum(launch.cost.products for launch in launches if launch.name == "attend_tile") == (
        H * (64 * 90 + 192 * 32) * 90 * (64 + 64)
    )
