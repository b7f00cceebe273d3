"""No method reads anything back from a GPU, forward or backward, on the kernels or on the reference.

What does is listed here, and says so in its docstring.
"""

from contextlib import AbstractContextManager

import pytest
import torch

import subquad as sq
from subquad import Mask
from subquad.kernels.triton.recording import recording
from subquad.testing.oracle import hidden_for
from tests.library.test_contract import OF_OTHER_CODE
from tests.library.triton.compiled.fits import meta
from tests.library.triton.compiled.waits import waits

B, H, G, N, D = 2, 4, 2, 64, 32
METHODS = [
    *(sq.from_dict({"name": name, **sq.METHODS[name].traits.example}) for name in sq.list_methods()),
    *map(sq.parse_method, OF_OTHER_CODE),
]
MISSING = "it does not have this op"  # the triton backend: those of an op are one file, which may not be there yet
REASONS = (
    MISSING,
    "the kernels add nothing to the logits by distance",  # "local" with relative positions
    "`shown` names some",  # sums of several choices of pairs, or of one and a tail
    "by_features=True",  # sums with a feature map
)

every_method = pytest.mark.parametrize("method", METHODS, ids=str)
RAISED = RuntimeError, NotImplementedError  # by the meta device, where a number is read or a shape follows data


def inputs(grad: bool = False, length: int = N) -> list[torch.Tensor]:
    return [meta(B, heads, length, D, grad=grad) for heads in (H, G, G)]


def bound(method: sq.Method) -> sq.BoundMethod:
    return method.bind(heads=H, kv_heads=G, head_dim=D, max_length=N).to("meta")


def on(backend: str) -> AbstractContextManager[object]:
    return recording() if backend == "triton" else sq.use_backend(backend)


def assert_never_waits(method: sq.Method, mask: Mask, **how: object) -> None:
    """A training step, with the auxiliary loss."""
    layer = bound(method)

    def call() -> None:
        q, k, v = inputs(grad=True)
        out = layer(q, k, v, mask=mask, **hidden_for(method, q), **how)
        loss = layer.auxiliary_loss()
        (out.sum() if loss is None else out.sum() + loss).backward()

    assert waits(call) == []


@pytest.mark.parametrize("backend", ["reference", "triton"])
@every_method
def test_attention_never_waits(method, backend):
    lengths, valid = Mask.padding(meta(B, dtype=torch.int64)), Mask.padding(meta(B, N, dtype=torch.bool))
    layer = bound(method)
    try:
        with on(backend):
            with torch.no_grad():
                q, k, v = inputs()
                assert waits(lambda: layer(q, k, v, mask=lengths, **hidden_for(method, q))) == []
            assert_never_waits(method, Mask())
            assert_never_waits(method, valid if method.traits.causal == "no" else valid & Mask.causal())
    except ValueError as error:
        if backend != "triton" or not any(reason in str(error) for reason in REASONS):
            raise
        pytest.skip(str(error))


@every_method
def test_keeping_tokens_of_a_list_never_waits(method):
    if method.traits.lse and not method.is_exact:
        with sq.use_backend("reference"):
            assert_never_waits(method, Mask.padding(meta(B, dtype=torch.int64)), keep=[0, -1])


@pytest.mark.parametrize("method", [m for m in METHODS if m.traits.recurrent], ids=str)
def test_steps_never_wait(method):
    if method.name == "linformer":
        pytest.skip("a step reads how many tokens there were: `Linformer.advance`")
    layer, (q, k, v) = bound(method), inputs(length=1)
    with sq.use_backend("reference"), torch.no_grad():
        assert waits(lambda: layer.step(q, k, v, layer.init_state(B, like=q))) == []


@every_method
def test_only_packed_segments_wait_where_a_method_takes_none(method):
    mask = Mask.segments(meta(B, N, dtype=torch.int64))
    with sq.use_backend("reference"):
        if method.traits.takes_segments:
            assert_never_waits(method, mask)
        else:
            q, k, v = inputs()
            with pytest.raises(ValueError, match="segment ids must be read, but their numbers are not available"):
                bound(method)(q, k, v, mask=mask, **hidden_for(method, q))


def test_redraws_wait():
    layer = bound(sq.parse_method("performer:features=16,redraw=3"))
    with sq.use_backend("reference"), torch.no_grad():
        assert waits(lambda: layer(*inputs())) == ["the number of redraws is read"]


def test_keeping_tokens_of_a_bool_waits():
    with sq.use_backend("reference"), pytest.raises(ValueError, match="the bools of `keep` must be read"):
        sq.attention(*inputs(), method="clustered:clusters=5", enable_gqa=True, keep=meta(B, N, dtype=torch.bool))


@pytest.mark.parametrize(
    ("call", "found"),
    [
        (lambda x: torch.tensor([1.0, 2], device="meta"), "tensor of Python's numbers"),
        (lambda x: x.new_tensor([1.0, 2]), "new_tensor of Python's numbers"),
        (lambda x: x[[0, 1]], "an index from the CPU"),
        (lambda x: x[torch.tensor([0, 1])], "an index from the CPU"),
        (lambda x: torch.ones(3).to("meta"), "aten::_to_copy from the CPU"),
        (lambda x: x.copy_(torch.ones(5)), "aten::copy_ from the CPU"),
        (lambda x: torch.linalg.inv(x.new_empty(2, 2)), "aten::_linalg_check_errors"),
    ],
)
def test_what_is_looked_for(call, found):
    assert waits(lambda: call(meta(5, dtype=torch.float32))) == [found]


@pytest.mark.parametrize("read", [lambda x: x.sum().item(), lambda x: bool(x.any()), lambda x: x[x > 0], torch.unique])
def test_what_raises_by_itself(read):
    with pytest.raises(RAISED):
        waits(lambda: read(meta(5, dtype=torch.float32)))
