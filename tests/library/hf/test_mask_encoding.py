"""The mask that is handed through transformers: what is encoded is what is decoded.

Masks over queries and keys, which a model's own code makes, are read as they are or refused.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from subquad.hf.mask_encoding import DecodedMask, decode, encode
from subquad.masks import Mask

VALID = torch.tensor([[True, True, True, False], [True, True, True, True]])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("valid", [VALID, None])
def test_padding_comes_back(causal, valid):
    given = encode(causal=causal, valid=valid, filled=None, segments=None, batch=2)
    assert given.ndim == 4
    assert given.numel() <= 8  # never N×M
    decoded = decode(given, 4, 4, causal=not causal, label="0")
    assert decoded.causal == causal
    assert (decoded.valid is None) == (valid is None)
    assert valid is None or torch.equal(decoded.valid, valid)
    assert decoded.offset == 0


@pytest.mark.parametrize("causal", [True, False])
def test_segments_come_back(causal):
    segments = torch.tensor([[1, 1, 2, 2]])
    given = encode(causal=causal, valid=None, filled=None, segments=segments, batch=1)
    packed = decode(given, 4, 4, causal=not causal, label="")
    assert packed.causal == causal
    assert torch.equal(packed.segments, segments - 1)


def test_slots_come_back():
    filled = torch.tensor([True, True, True, False, False, False])
    valid = torch.tensor([[False, True, True, False, False, False]])
    static = decode(
        encode(causal=True, valid=valid, filled=filled, segments=None, batch=1), 2, 6, causal=False, label=""
    )
    assert static.offset == 1
    assert torch.equal(static.valid, valid)
    assert torch.equal(static.queries(2), torch.tensor([[True, True]]))


def test_a_step_on_a_growing_cache_stands_at_its_end():
    decoded = decode(
        encode(causal=True, valid=VALID, filled=None, segments=None, batch=2), 1, 4, causal=False, label=""
    )
    assert decoded.offset == 3
    assert torch.equal(decoded.queries(1), torch.tensor([[False], [True]]))


@pytest.mark.parametrize("causal", [True, False])
def test_without_a_mask_the_layer_says_whether_it_is_causal(causal):
    assert decode(None, 4, 4, causal=causal, label="0").causal == causal


@pytest.mark.parametrize("least", [torch.finfo(torch.float32).min, -torch.inf, -1e4])
def test_additive_padding_of_a_models_own_is_read(least):
    bias = torch.where(VALID, 0.0, least)[:, None, None]
    assert torch.equal(decode(bias, 4, 4, causal=True, label="0").valid, VALID)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (torch.zeros(2, 4), r"shape \(2, 4\); subquad accepts 2-D padding masks"),
        (torch.ones(2, 4, 1, 4, dtype=torch.bool), r"\(2, 4, 1, 4\), but it has 4 queries and 4 keys"),
        (torch.ones(2, 1, 3, 4, dtype=torch.bool), r"\(2, 1, 3, 4\), but it has 4 queries and 4 keys"),
        (torch.ones(2, 1, 1, 3, dtype=torch.bool), "3 positions, but there are 4 keys"),
        (torch.ones(2, 1, 1, 4, dtype=torch.int64), "dtype torch.int64"),
        (torch.full((2, 1, 1, 4), -0.5), "values other than 0 and less than -10000"),
    ],
)
def test_what_is_not_padding_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        decode(given, 4, 4, causal=True, label="0 (attn)")


# ---------------------------------------------------------------------- masks over queries and keys

N = 6
SEGMENTS = torch.tensor([[0, 0, 0, 1, 1, 2], [0, 1, 1, 1, 1, 1]])
PADDED = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
TRIL = torch.ones(N, N, dtype=torch.bool).tril()


def blocks(ids: Tensor) -> Tensor:
    return (ids[:, :, None] == ids[:, None, :])[:, None]


def near(first: int, last: int) -> Tensor:
    distance = torch.arange(N) - torch.arange(N)[:, None]
    return ((distance >= first) & (distance <= last))[None, None]


READ = {
    "everything": torch.ones(2, 1, N, N, dtype=torch.bool),
    "padding": PADDED[:, None, None, :].expand(2, 1, N, N).clone(),
    "padding of both sides": (PADDED[:, :, None] & PADDED[:, None, :])[:, None],
    "causal": TRIL[None, None],
    "causal, padded right": TRIL & PADDED[:, None, None, :],
    "causal, padded left": TRIL & PADDED.flip(1)[:, None, None, :],
    "segments": blocks(SEGMENTS),
    "segments of one token": torch.eye(N, dtype=torch.bool)[None, None],
    "segments and padding": blocks(SEGMENTS) & PADDED[:, None, :, None] & PADDED[:, None, None, :],
    "causal segments": blocks(SEGMENTS) & TRIL,
    "a window": near(-2, 2),
    "a causal window": near(-2, 0),
    "the same for all heads": blocks(SEGMENTS).expand(2, 3, N, N),
}


def additive(allowed: Tensor, least: float = torch.finfo(torch.float32).min) -> Tensor:
    return torch.where(allowed, 0.0, least)


def dense(decoded: DecodedMask, rows: int = N, keys: int = N) -> Tensor:
    """The mask that was read, as one over queries and keys."""
    mask = Mask.causal(offset=decoded.offset) if decoded.causal else Mask(offset=max(keys - rows, 0))
    mask = mask if decoded.segments is None else mask & Mask.segments(decoded.segments)
    mask = mask if decoded.window is None else mask & Mask.window(decoded.window)
    mask = mask if decoded.valid is None else mask & Mask.padding(keys=decoded.valid)
    return mask.to_dense(rows, keys).expand(2, -1, -1, -1)


@pytest.mark.parametrize("kind", [lambda allowed: allowed, additive, lambda allowed: additive(allowed, -torch.inf)])
@pytest.mark.parametrize("name", READ)
def test_a_mask_over_queries_and_keys_is_read_as_it_is(name: str, kind: Callable[[Tensor], Tensor]):
    allowed = READ[name]
    decoded = decode(kind(allowed), N, N, causal=False, label="0", batch=2)
    assert decoded.read
    assert torch.equal(dense(decoded), allowed[:, :1].expand(2, -1, -1, -1))


def test_a_causal_mask_of_new_queries_ends_with_the_keys():
    allowed = torch.ones(2, 5, dtype=torch.bool).tril(3)[None, None]
    decoded = decode(allowed, 2, 5, causal=False, label="0", batch=2)
    assert (decoded.causal, decoded.offset) == (True, 3)
    assert torch.equal(dense(decoded, 2, 5), allowed.expand(2, -1, -1, -1))
    with pytest.raises(ValueError, match="not padding of the keys, causality, segments or a window"):
        decode(torch.ones(2, 5, dtype=torch.bool).tril()[None, None], 2, 5, causal=False, label="0")


def changed(allowed: Tensor) -> Tensor:
    """The mask with one element changed, in the last item."""
    other = allowed.clone()
    other[-1, 0, 4, 1] = ~other[-1, 0, 4, 1]
    return other


@pytest.mark.parametrize("kind", [lambda allowed: allowed, additive])
@pytest.mark.parametrize("name", [name for name in READ if name != "the same for all heads"])
def test_one_element_that_differs_is_refused(name: str, kind: Callable[[Tensor], Tensor]):
    with pytest.raises(ValueError, match=r"layer 0 \(attn\) was given an attention mask of shape .*sq.hf.restore"):
        decode(kind(changed(READ[name])), N, N, causal=False, label="0 (attn)")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (additive(READ["causal"]) - 0.5, "a bias on the logits and not a mask"),
        (additive(READ["causal"]).requires_grad_(), "a bias on the logits and not a mask"),
        (torch.stack([READ["causal"][0, 0], READ["segments"][0, 0]])[None], "differs between heads"),
        (READ["causal"].long(), "torch.int64"),
        (blocks(torch.tensor([[0, 1, 0, 1, 0, 1]])), "not padding of the keys, causality, segments or a window"),
        (additive(near(-2, -1)), "hides all keys of a query with finite numbers"),
        (READ["causal"].to("meta"), "cannot be read while compiling; run without torch.compile"),
    ],
)
def test_what_no_mask_says_is_refused_with_the_reason(given: Tensor, message: str):
    with pytest.raises(ValueError, match=message):
        decode(given, N, N, causal=False, label="0")
