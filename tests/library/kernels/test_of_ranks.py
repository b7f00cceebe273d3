"""The ops that ranks run on their own tokens: compiled kernels equal plain PyTorch, forward and backward."""

import pytest
import torch
from torch import Tensor

import subquad as sq
from subquad.kernels import native
from subquad.kernels.attention.clustered.centroids import attend_and_list
from subquad.kernels.attention.listed.op import attend_in_clusters
from subquad.kernels.attention.sums.op import group_sums
from subquad.kernels.attention.tail.visible_key_cells import visible_key_cells
from subquad.kernels.selection.shards.op import assign_codes, assign_means, centred_codes, moments_of
from subquad.kernels.selection.shards.reference import Term
from subquad.testing.oracle import normal, qkv, tracked

pytestmark = pytest.mark.skipif(native.refusal() is not None, reason=f"no compiled kernels: {native.refusal()}")
VALID = torch.arange(70) % 5 != 2, torch.arange(70) < 4


def valid(padded: bool) -> Tensor | None:
    return torch.stack(VALID) if padded else None


def both(call) -> tuple[list[Tensor], list[Tensor]]:
    """Return the results of a call on the compiled backend and on the reference."""
    found = []
    for backend in ("cpu", "reference"):
        with sq.use_backend(backend):
            result = call()
        found.append(list(result) if isinstance(result, tuple) else [result])
    return found[0], found[1]


def with_gradients(call, inputs: list[Tensor]) -> list[Tensor]:
    """Outputs, and gradients of those outputs that are numbers and finite."""
    outputs = [x for x in call(*inputs) if x.is_floating_point()]
    seen = [torch.where(x.isneginf(), 0.0, x) for x in outputs]
    loss = sum((x * normal(*x.shape, seed=n)).sum() for n, x in enumerate(seen))
    return [*outputs, *torch.autograd.grad(loss, inputs)]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_choices_equal_the_reference(variant, padded, dtype):
    x, y, mask = normal(2, 3, 70, 9).to(dtype) + 1, normal(2, 3, 70, 4, seed=1).to(dtype), valid(padded)
    (mean, squares), want = both(lambda: moments_of(x, mask))
    torch.testing.assert_close([mean, squares], want)
    terms = Term(x, mean, squares + 1), Term(y, moments_of(y, mask)[0], squares)
    for planes in (normal(1, 1, 63, 13), normal(2, 3, 20, 13)):
        codes, want = both(lambda planes=planes: centred_codes(terms, planes, mask))
        assert torch.equal(codes[0], want[0])
    have, want = both(lambda: assign_codes(codes[0], codes[0][:, :, :11].contiguous(), mask))
    assert all(torch.equal(a, b) for a, b in zip(have, want, strict=True))
    halves = normal(2, 3, 7, 1)[..., 0].masked_fill(torch.arange(7) == 2, torch.inf)
    have, want = both(lambda: assign_means(x, mean, normal(2, 3, 9, 7), halves, mask))
    assert torch.equal(have[0], want[0])


@pytest.mark.parametrize(("B", "H"), [(1, 1), (2, 1), (1, 3), (2, 3)])
def test_planes_are_those_of_each_item_and_head(variant, B, H):
    """This holds for one head too: a size of one in one axis does not say that the other axis shares its planes."""
    x = normal(B, H, 30, 9)
    terms = (Term(x, *moments_of(x, None)),)
    for shape in {(1, 1), (1, H), (B, 1), (B, H)}:
        planes = normal(*shape, 20, 9, seed=1)
        codes, want = both(lambda planes=planes: centred_codes(terms, planes, None))
        assert torch.equal(codes[0], want[0]), shape


def test_sums_of_groups_equal_the_reference(variant):
    x, labels = normal(2, 3, 70, 9).requires_grad_(), torch.arange(420).view(2, 3, 70) * 7 % 8 - 1
    have, want = both(lambda: (*group_sums(x, labels, 6), *with_gradients(lambda y: group_sums(y, labels, 6), [x])))
    torch.testing.assert_close(have, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("topk", [0, 5, 90])
@pytest.mark.parametrize("padded", [False, True])
def test_centroids_list_their_top_keys(variant, topk, padded):
    inputs, mask = tracked(*qkv(6, 70, B=2, H=4, G=2)), valid(padded)

    def run(*given: Tensor) -> tuple[Tensor, ...]:
        return attend_and_list(*given, mask, topk=topk, scale=0.4)

    have, want = both(lambda: (run(*inputs)[2], *with_gradients(run, inputs)))
    torch.testing.assert_close(have, want, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("topk", [0, 5, 90])
@pytest.mark.parametrize("padded", [False, True])
def test_cells_have_gradients_of_their_own(variant, topk, padded):
    inputs, mask = tracked(*qkv(6, 70, B=2, H=4, G=2)), valid(padded)
    cell = (torch.arange(280).view(2, 2, 70) * 5 % 3).contiguous()
    cell = cell if mask is None else torch.where(mask[:, None], cell, 3)
    terms = normal(2, 4, 70, seed=9)

    def run(*given: Tensor) -> tuple[Tensor, ...]:
        return tuple(visible_key_cells(*given, cell, terms, cells=3, topk=topk, scale=0.4))

    have, want = both(lambda: (run(*inputs)[3], *with_gradients(run, inputs)))
    for a, b in zip(have, want, strict=True):
        torch.testing.assert_close(a, b, atol=3e-5, rtol=1e-5)


def test_members_attend_to_what_their_cluster_lists(variant):
    key, value, bias = normal(2, 3, 6, 4, 9), normal(2, 3, 6, 4, 5, seed=1), normal(2, 3, 6, 4, seed=2)
    inputs = tracked(normal(2, 3, 70, 9, seed=3), key, value, bias)
    labels = torch.arange(420).view(2, 3, 70) % 7
    cluster = torch.arange(6)[:, None]
    present = ((cluster < 4) & ((cluster + torch.arange(4)) % 3 > 0)).expand(2, 3, 6, 4)

    def run(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return attend_in_clusters(query, labels, key, value, bias, present, 0.4)

    have, want = both(lambda: tuple(with_gradients(run, inputs)))
    torch.testing.assert_close(have, want, atol=1e-5, rtol=1e-5)
    assert have[0][labels >= 4].abs().max() == 0
