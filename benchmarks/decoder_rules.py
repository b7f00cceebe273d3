"""Causal by halves with other sizes, other choices of top keys and other cells, for the scripts about decoders."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from subquad.kernels.attention.tail.key_choice import spread_of, top_keys
from subquad.kernels.attention.tail.op import attend_with_tail
from subquad.kernels.selection.cells.op import key_cells
from subquad.kernels.selection.clusters.op import query_clusters
from subquad.kernels.selection.group_means import broadcast, group_mean
from subquad.kernels.tokens.heads import repeat_heads
from subquad.methods import ClusteredTail, ImprovedClustered
from subquad.methods.clustered_tail import OF_RECTANGLE, by_length
from subquad.methods.core.method import Call, Partial, choice, number, whole
from subquad.methods.core.rectangles import rectangles_of

WIDTH = 64  # of a head of the model
ROPE_BASE = 100_000.0  # of SmolLM2


@dataclass(frozen=True)
class TailByRule(ClusteredTail):
    """`clustered-tail` by halves: cluster_factor·√n clusters, topk_factor·√m keys and cells_factor·√m cells if set."""

    cluster_factor: float = number(0.0, least=0.0)
    topk_factor: float = number(0.0, least=0.0)
    cells_factor: float = number(0.0, least=0.0)

    name: ClassVar[str] = "tail-by-rule"

    def in_rectangle(self, queries: int, keys: int) -> ClusteredTail:
        """The method with the sizes of the rule in a rectangle without padding, as far as none is set."""
        by_default = (
            by_length(setting, growth, tokens, None)[0]
            for setting, growth, tokens in zip((self.clusters, self.topk), OF_RECTANGLE, (queries, keys), strict=True)
        )
        clusters, topk = by_default
        return replace(
            self,
            clusters=self.clusters or by_factor(self.cluster_factor, queries) or clusters,
            topk=self.topk or by_factor(self.topk_factor, keys) or topk,
            cells=by_factor(self.cells_factor, keys) or self.cells,
        )

    def attend_in_rectangle(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Partial:
        return self.in_rectangle(query.shape[2], key.shape[2]).attend(query, key, value, call)

    def products(self, length: int) -> float:
        """Multiply-adds of a head of 64 for a prompt: diagonal, last rows, and of each rectangle its three parts.

        These are centroids C·m·3D, k-means 2·n·C·D for two rounds, and members n·(k + X)·2D. Covariances, linear in the
        length, are not counted.
        """
        block = self.sized_for(torch.float32).block
        parts = [part for group in rectangles_of(length, 0, block) for part in group]
        if self.queries == "block":
            parts = [rows for part in parts for rows in part.in_blocks(block)]
        total = self.last * length * 2.0 * WIDTH
        for part in parts:
            if part.diagonal:
                total += part.count * part.queries**2 * WIDTH
                continue
            inside = self.in_rectangle(part.queries, part.keys)
            centroids = inside.clusters * part.keys * 3 + self.refine * part.queries * inside.clusters
            total += part.count * WIDTH * (centroids + part.queries * (inside.topk + inside.cells) * 2)
        return total


@dataclass(frozen=True)
class ClusteredByRule(ImprovedClustered):
    """`i-clustered` by halves: 2·√n clusters and 4·√m keys."""

    name: ClassVar[str] = "i-clustered-by-rule"

    def in_rectangle(self, queries: int, keys: int) -> ImprovedClustered:
        return replace(self, clusters=by_factor(2.0, queries), topk=by_factor(4.0, keys))

    def attend_in_rectangle(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Partial:
        return self.in_rectangle(query.shape[2], key.shape[2]).attend(query, key, value, call)


@dataclass(frozen=True)
class TailOfVariant(TailByRule):
    """The same with other cells, another metric of the clusters, or another choice of top keys.

    Args:
        cells_space: what the cells' k-means sees of the keys. "positions": as they are, after RoPE. "content": turned
            back by their index in the rectangle, which is before RoPE up to one turn that all keys share.
        cells_without: the number of pairs of dimensions with the highest frequencies that the cells do not see.
        clusters_without: the same of the queries and keys from which the clusters are made.
        keys_by: how top keys are chosen. "mean weight": as in `clustered-tail`, by the mean of the weights that the
            queries of the cluster give them, times the distance to the mean of their cell. "distance": by the weight
            that the mean query gives them, times that distance. "weight": by that weight alone.
    """

    cells_space: str = choice("positions", "content")
    cells_without: int = whole(0)
    clusters_without: int = whole(0)
    keys_by: str = choice("mean weight", "distance", "weight")

    name: ClassVar[str] = "tail-of-variant"

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Partial:
        clusters, topk = min(self.clusters, query.shape[2]), min(self.topk, key.shape[2])
        seen = turned_back(key) if self.cells_space == "content" else key
        cell = key_cells(without(seen, self.cells_without), value, None, cells=self.cells, seed=call.seed)
        settings = {"bits": self.bits, "iterations": self.iterations, "refine": self.refine, "seed": call.seed}
        both = [without(x, self.clusters_without) for x in (query, key)]
        labels = query_clusters(*both, None, None, space="logits", clusters=clusters, **settings)
        keys = None  # by mean weight
        if self.keys_by != "mean weight":
            keys = top_keys_by(self.keys_by, query, key, labels, cell, clusters, topk, self.cells, call.scale)
        sizes = {"clusters": clusters, "topk": topk, "cells": self.cells, "scale": call.scale}
        return attend_with_tail(query, key, value, labels, cell, keys, wanted=None, dropout_p=0.0, **sizes)


def top_keys_by(
    choice: str,
    query: Tensor,
    key: Tensor,
    labels: Tensor,
    cell: Tensor,
    clusters: int,
    topk: int,
    cells: int,
    scale: float,
) -> Tensor:
    """The top keys of each cluster (B,H,C,k), by "distance" or "weight" as `TailOfVariant` says."""
    distances = spread_of(key - broadcast(group_mean(key, cell, cells), cell))[:, :, None]
    terms = repeat_heads(distances, query.shape[1])[:, :, 0] * (choice == "distance")
    return top_keys(group_mean(query, labels, clusters), key, cell, topk, None, cells, scale, terms)


def by_factor(factor: float, size: int) -> int:
    """factor·√size, rounded up."""
    return math.ceil(factor * math.sqrt(size) - 1e-9)


def without(x: Tensor, pairs: int) -> Tensor:
    """Vectors without the pairs of dimensions that RoPE turns fastest; a pair is a dimension of each half."""
    half = x.shape[-1] // 2
    return torch.cat([x[..., pairs:half], x[..., half + pairs :]], -1) if pairs else x


def turned_back(key: Tensor) -> Tensor:
    """Keys (B,G,M,D) turned back by RoPE's angle at their index."""
    half = key.shape[-1] // 2
    frequencies = ROPE_BASE ** (-torch.arange(half, device=key.device) / half)
    angles = torch.arange(key.shape[2], device=key.device)[:, None] * frequencies
    sin, cos = angles.sin(), angles.cos()
    first, second = key[..., :half], key[..., half:]
    return torch.cat([first * cos + second * sin, second * cos - first * sin], -1)
