"""Layers for sets: attention blocks, inducing points, pooling by attention, and the Set Transformer of Lee et al. 2019.

    MAB(X, Y)  = LayerNorm(H + rFF(H)),  H = LayerNorm(X + Multihead(X, Y, Y))       equations 6 and 7
    SAB(X)     = MAB(X, X)                                                           equation 8
    ISAB_m(X)  = MAB(X, MAB(I, X))                                                   equations 9 and 10
    PMA_k(Z)   = MAB(S, rFF(Z))                                                      equation 11

==========  =============================================
paper       here
==========  =============================================
MAB, SAB    `SetAttention`, with two sets or with one
ISAB        `InducedSetAttention`
I           `points`
PMA         `PoolingByAttention`
S           `seeds`
==========  =============================================

Sets of different sizes are padded, with `Mask.padding(sizes)` as the mask; padding changes no output. Attention to an
empty set returns 0, so its pooled output depends on the parameters alone.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from subquad.core.shapes import Sizes
from subquad.masks import Mask
from subquad.methods import Method, resolve
from subquad.methods.core.current_shard import refuse_in_use
from subquad.nn.attention import MultiheadAttention


class SetAttention(nn.Module):
    """Attention from a set to another, or to itself, with a feed-forward layer (MAB and SAB).

        out = LayerNorm(H + rFF(H)),  H = LayerNorm(x + attention(x, y, y))

    Lee et al. 2019, "Set Transformer", equations 6 to 8. Permuted elements of `x` give permuted outputs, and the order
    of `y` does not matter, exactly if the method's traits have `order_free` and not `positional`, as those of "full"
    do; otherwise approximately.

    Args:
        width: width of the elements and of the outputs.
        heads: number of heads; must divide `width`.
        method: a name, a name with settings, or a method object.
        feed_forward: width inside the feed-forward layer; None means `width`.
        dropout: in training, the rate of dropout of the attention, and of what each of the two parts adds.
        max_length: the largest set, for methods whose parameters depend on it.

    >>> import torch, subquad as sq
    >>> layer = sq.nn.SetAttention(32, 4)
    >>> layer(torch.randn(2, 10, 32), mask=sq.Mask.padding([10, 7])).shape
    torch.Size([2, 10, 32])
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        method: str | Method = "full",
        feed_forward: int | None = None,
        dropout: float = 0.0,
        max_length: int | None = None,
    ):
        super().__init__()
        if width < 1 or heads < 1 or width % heads:
            raise ValueError(f"width={width} is not a multiple of heads={heads}, both at least 1")
        self.attention = MultiheadAttention(width, heads, method=method, dropout=dropout, max_length=max_length)
        self.attention_norm = nn.LayerNorm(width)
        self.feed_forward = row_wise(width, feed_forward)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Float[Tensor, "B N W"],
        y: Float[Tensor, "B M W"] | None = None,
        *,
        mask: Mask | None = None,
        seed: int | None = None,
    ) -> Float[Tensor, "B N W"]:
        """Attend from the elements of `x` to those of `y`, or to each other; padded ones are 0.

        Args:
            x: the set that attends.
            y: the set that is attended to; None means `x`.
            mask: `Mask.padding(sizes)` of one set, or `Mask.padding(queries=…, keys=…)` of `x` and `y`.
            seed: as in `subquad.attention`.

        Raises:
            ValueError: another width or batch, a mask that is not only padding, or `y` for a method without
                cross-attention.
        """
        check_sets(self.attention.embed_dim, x, y)
        valid, visible = paddings(mask, x, x if y is None else y)
        x, y = cleared(x, valid), None if y is None else cleared(y, visible)
        if y is not None and y.shape[1] == 0:  # methods need a key, so one that is padding
            y, mask = y.new_zeros(len(y), 1, y.shape[2]), _hiding_all(x, valid)
        attended = self.attention(x, y, mask=mask, seed=seed)
        hidden = self.attention_norm(x + self.dropout(attended))
        return cleared(self.feed_forward_norm(hidden + self.dropout(self.feed_forward(hidden))), valid)


class InducedSetAttention(nn.Module):
    """Self-attention of a set through a few learned points, in time linear in its size (ISAB).

        out = MAB(x, MAB(points, x))

    Lee et al. 2019, "Set Transformer", equations 9 and 10. Permuted elements give permuted outputs.

    Args:
        width: width of the elements and of the outputs.
        heads: number of heads; must divide `width`.
        points: number of learned points.
        method: a method with cross-attention: a name, a name with settings, or a method object.
        feed_forward: width inside the feed-forward layers; None means `width`.
        dropout: as in `SetAttention`.
        max_length: the largest set, for methods whose parameters depend on it.

    Raises:
        ValueError: a method without cross-attention.

    >>> import torch, subquad as sq
    >>> layer = sq.nn.InducedSetAttention(32, 4, points=8)
    >>> layer(torch.randn(2, 1000, 32), mask=sq.Mask.padding([1000, 70])).shape
    torch.Size([2, 1000, 32])
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        points: int = 32,
        method: str | Method = "full",
        feed_forward: int | None = None,
        dropout: float = 0.0,
        max_length: int | None = None,
    ):
        super().__init__()
        method = with_cross_attention(method, type(self).__name__)
        self.points = learned_elements("points", points, width)
        longest = None if max_length is None else max(max_length, points)
        options: dict[str, Any] = {"method": method, "feed_forward": feed_forward, "dropout": dropout}
        self.gather, self.spread = (SetAttention(width, heads, max_length=longest, **options) for _ in range(2))

    def forward(
        self, x: Float[Tensor, "B N W"], *, mask: Mask | None = None, seed: int | None = None
    ) -> Float[Tensor, "B N W"]:
        """Attend from the elements to each other; padded ones are 0. `mask` is `Mask.padding(sizes)`.

        Raises:
            ValueError: another width, or a mask that is not only padding.
        """
        check_sets(self.points.shape[1], x)
        valid = elements(mask, x)
        summary = self.gather(self.points.expand(len(x), -1, -1), x, mask=_keys(valid), seed=seed)
        return self.spread(x, summary, mask=None if valid is None else Mask.padding(queries=valid), seed=seed)


class PoolingByAttention(nn.Module):
    """Pool a set of any size into a fixed number of vectors, by attention from learned seeds (PMA).

        out = MAB(seeds, rFF(x))

    Lee et al. 2019, "Set Transformer", equation 11. The order of the elements does not matter. What is pooled of an
    empty set depends on the parameters alone.

    Args:
        width: width of the elements and of the outputs.
        heads: number of heads; must divide `width`.
        seeds: number of vectors that are pooled.
        method: a method with cross-attention: a name, a name with settings, or a method object.
        feed_forward: width inside the feed-forward layers; None means `width`.
        dropout: as in `SetAttention`.
        max_length: the largest set, for methods whose parameters depend on it.

    Raises:
        ValueError: a method without cross-attention.

    >>> import torch, subquad as sq
    >>> pool = sq.nn.PoolingByAttention(32, 4, seeds=3)
    >>> pool(torch.randn(2, 10, 32), mask=sq.Mask.padding([10, 0])).shape
    torch.Size([2, 3, 32])
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        seeds: int = 1,
        method: str | Method = "full",
        feed_forward: int | None = None,
        dropout: float = 0.0,
        max_length: int | None = None,
    ):
        super().__init__()
        method = with_cross_attention(method, type(self).__name__)
        self.seeds = learned_elements("seeds", seeds, width)
        self.feed_forward = row_wise(width, feed_forward)
        longest = None if max_length is None else max(max_length, seeds)
        options: dict[str, Any] = {"method": method, "feed_forward": feed_forward, "dropout": dropout}
        self.pool = SetAttention(width, heads, max_length=longest, **options)

    def forward(
        self, x: Float[Tensor, "B N W"], *, mask: Mask | None = None, seed: int | None = None
    ) -> Float[Tensor, "B S W"]:
        """The pooled vectors of each set. `mask` is `Mask.padding(sizes)`.

        Raises:
            ValueError: another width, or a mask that is not only padding.
        """
        check_sets(self.seeds.shape[1], x)
        valid = elements(mask, x)
        x = self.feed_forward(cleared(x, valid))
        return self.pool(self.seeds.expand(len(x), -1, -1), x, mask=_keys(valid), seed=seed)


class SetTransformer(nn.Module):
    """A function of sets: attention blocks on the elements, pooling by attention, and blocks on the pooled vectors.

        out = W_O SAB(PMA_k(ISAB_m(… W_I x)))

    Lee et al. 2019, "Set Transformer", section 3.3. The order of the elements does not matter. An output for an empty
    set depends on the parameters alone.

    Args:
        in_features: width of the elements.
        out_features: width of the outputs.
        width: width of the hidden elements.
        heads: number of heads; must divide `width`.
        layers: blocks on the elements.
        points: learned points of these blocks, ISAB; 0 means SAB, in which all elements meet.
        seeds: number of outputs for each set.
        decoder_layers: blocks (SAB) on what is pooled.
        method: the method of the blocks on the elements and of the pooling. The blocks on what is pooled are exact.
        feed_forward: width inside the feed-forward layers; None means `width`.
        dropout: as in `SetAttention`.
        max_length: the largest set, for methods whose parameters depend on it.

    Raises:
        ValueError: a method without cross-attention.

    >>> import torch, subquad as sq
    >>> model = sq.nn.SetTransformer(2, 5, width=32, points=8, seeds=4)
    >>> model(torch.randn(3, 100, 2), mask=sq.Mask.padding([100, 1, 0])).shape
    torch.Size([3, 4, 5])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        width: int = 128,
        heads: int = 4,
        layers: int = 2,
        points: int = 32,
        seeds: int = 1,
        decoder_layers: int = 1,
        method: str | Method = "full",
        feed_forward: int | None = None,
        dropout: float = 0.0,
        max_length: int | None = None,
    ):
        super().__init__()
        counts = {"in_features": in_features, "out_features": out_features, "layers": layers}
        for name, count in counts.items():
            _check_least(name, count, 1)
        for name, count in {"points": points, "decoder_layers": decoder_layers}.items():
            _check_least(name, count, 0)
        common: dict[str, Any] = {"feed_forward": feed_forward, "dropout": dropout}
        inner = {**common, "method": method, "max_length": max_length}
        self.embed = nn.Linear(in_features, width)
        self.encoder = nn.ModuleList(
            InducedSetAttention(width, heads, points=points, **inner) if points else SetAttention(width, heads, **inner)
            for _ in range(layers)
        )
        self.pool = PoolingByAttention(width, heads, seeds=seeds, **inner)
        self.decoder = nn.ModuleList(SetAttention(width, heads, **common) for _ in range(decoder_layers))
        self.head = nn.Linear(width, out_features)

    def forward(
        self, x: Float[Tensor, "B N I"], *, mask: Mask | None = None, seed: int | None = None
    ) -> Float[Tensor, "B S O"]:
        """The outputs of each set, `seeds` of them. `mask` is `Mask.padding(sizes)`.

        Raises:
            ValueError: another width, or a mask that is not only padding.
        """
        check_sets(self.embed.in_features, x)
        valid = elements(mask, x)
        padding = None if valid is None else Mask.padding(valid)
        hidden = self.embed(cleared(x, valid))
        for block in self.encoder:
            hidden = block(hidden, mask=padding, seed=seed)
        hidden = self.pool(hidden, mask=padding, seed=seed)
        for block in self.decoder:
            hidden = block(hidden)
        return self.head(hidden)


def row_wise(width: int, inside: int | None) -> nn.Sequential:
    """The rFF of the paper: the same feed-forward layer for each element."""
    inside = width if inside is None else inside
    _check_least("feed_forward", inside, 1)
    return nn.Sequential(nn.Linear(width, inside), nn.ReLU(), nn.Linear(inside, width))


def learned_elements(name: str, count: int, width: int) -> nn.Parameter:
    """Learned elements of a set, which start as the published code's."""
    _check_least(name, count, 1)
    return nn.Parameter(nn.init.xavier_uniform_(torch.empty(count, width)))


def with_cross_attention(method: str | Method, where: str) -> Method:
    """The method; ValueError where it has no cross-attention."""
    method = resolve(method)
    if not method.traits.cross:
        raise ValueError(
            f"{method.label!r} cannot run in {where}, which attends from learned elements to a set: its keys are those "
            "of the queries; use a method with cross-attention, such as 'full', 'lsh' or 'linear'"
        )
    return method


def check_sets(width: int, x: Tensor, y: Tensor | None = None) -> None:
    """ValueError where sets are not (B, elements, width), or are of two batches; the message names both sides."""
    refuse_in_use("a layer for sets", "gather the set on one rank, or use sq.nn.MultiheadAttention")
    for name, each in ({"x": x} | ({} if y is None else {"y": y})).items():
        if each.ndim != 3 or each.shape[2] != width:
            raise ValueError(f"`{name}` is {tuple(each.shape)}, but it must be (batch, elements, {width})")
    if y is not None and len(x) != len(y):
        raise ValueError(f"`x` contains {len(x)} sets but `y` contains {len(y)}; they must match")


def paddings(mask: Mask | None, x: Tensor, y: Tensor) -> tuple[Bool[Tensor, "B N"] | None, Bool[Tensor, "B M"] | None]:
    """The real elements of x and of y, as bools; None: all are real.

    Raises:
        ValueError: the mask is not only padding, or has other sizes.
    """
    if mask is None:
        return None, None
    if not mask.only_padding:
        raise ValueError(f"a set has no order and accepts padding only, Mask.padding(sizes), but the mask is {mask}")
    (B, N, W), M = x.shape, y.shape[1]
    mask.check(Sizes(B=B, H=1, G=1, N=N, M=M, D=W, E=W), x.device)
    return mask.query_padding(N), mask.key_padding(M)


def elements(mask: Mask | None, x: Tensor) -> Bool[Tensor, "B N"] | None:
    """The real elements of one set, as a bool; None: all are real. Errors as `paddings`."""
    if mask is not None and (mask.keys or mask.queries):
        raise ValueError(f"there is one set here, padded by Mask.padding(sizes), but the mask is {mask}")
    return paddings(mask, x, x)[0]


def cleared(x: Tensor, valid: Tensor | None) -> Tensor:
    """0 in place of padding, which may hold anything."""
    return x if valid is None else x.masked_fill(~valid[..., None], 0.0)


def _keys(valid: Tensor | None) -> Mask | None:
    return None if valid is None else Mask.padding(keys=valid)


def _hiding_all(x: Tensor, valid: Tensor | None) -> Mask:
    """One key in each item, which is padding."""
    none = torch.zeros(len(x), 1, dtype=torch.bool, device=x.device)
    return Mask.padding(keys=none, queries=valid)


def _check_least(name: str, count: int, least: int) -> None:
    if count < least:
        raise ValueError(f"{name}={count}, but it must be at least {least}")
