"""The ops over a rank's own tokens in compiled code."""

from typing import Any

import torch
from torch import Tensor

from subquad.kernels.native import interface
from subquad.kernels.selection.shards.op import (
    WORD,
    assign_codes,
    assign_means,
    centred_codes,
    labels_and_votes,
    labels_of_means,
    means_and_squares,
    moments_of,
    words_of_terms,
)


@moments_of.refusal("cpu")
def refusal(x: Any) -> str | None:
    """The reason why the compiled kernel cannot take these vectors; None if it can."""
    return interface.refusal(x.x)


assign_means.refusal("cpu")(refusal)


@centred_codes.refusal("cpu")
def refusal_of_terms(x: Any) -> str | None:
    """The reason why the compiled kernel cannot take these vectors; None if it can."""
    return interface.refusal(x.terms[0].x)


@assign_codes.refusal("cpu")
def refusal_of_codes(x: Any) -> str | None:
    """The reason why the compiled kernel cannot take these codes; None if it can."""
    return interface.refusal(x.codes, any_dtype=True)


@means_and_squares.on("cpu")
def moments(outputs: tuple[Tensor, Tensor], inputs: Any) -> None:
    """The CPU backend of `moments_of`."""
    B, H, N, D = inputs.x.shape
    interface.check("moments_of", valid=(inputs.valid, torch.bool, (B, N)))
    interface.run(
        "moments",
        **{"B": B, "H": H, "N": N, "D": D, "dtype": inputs.x.dtype, "threads": interface.threads(B * H * N * D)},
        **{"x": inputs.x, "valid": inputs.valid, "mean": outputs[0], "squares": outputs[1]},
    )


@words_of_terms.on("cpu")
def words(codes: Tensor, inputs: Any) -> None:
    """The CPU backend of `centred_codes`."""
    B, H, N, _ = inputs.xs[0].shape
    dtype, (bits, width) = inputs.xs[0].dtype, inputs.planes.shape[2:]
    shared = inputs.planes.shape[:2].numel() == 1  # by all items and heads: one head does not show the items
    terms = []
    for x, mean, factor in zip(inputs.xs, inputs.means, inputs.factors, strict=True):
        interface.check(
            "centred_codes",
            x=(x, dtype, (B, H, N, x.shape[3])),
            mean=(mean, torch.float64, (B, H, x.shape[3])),
            factor=(factor, torch.float64, (B, H)),
        )
        terms.append({"width": x.shape[3], "x": x, "mean": mean, "factor": factor})
    widths = sum(term["width"] for term in terms)
    planes = inputs.planes if shared else inputs.planes.expand(B, H, bits, width).contiguous()
    interface.check(
        "centred_codes",
        valid=(inputs.valid, torch.bool, (B, N)),
        planes=(planes, torch.float32, (*planes.shape[:2], bits, widths)),
    )
    interface.run(
        "centred_codes",
        **{"B": B, "H": H, "N": N, "bits": bits, "dtype": dtype, "terms": terms, "planes": planes},
        planes_head=0 if shared else bits * width,
        threads=interface.threads(2 * B * H * N * bits * width),
        valid=inputs.valid,
        codes=codes,
    )


@labels_and_votes.on("cpu")
def votes(outputs: tuple[Tensor, Tensor], inputs: Any) -> None:
    """The CPU backend of `assign_codes`."""
    (B, H, N), C = inputs.codes.shape, inputs.centroids.shape[2]
    interface.check(
        "assign_codes",
        codes=(inputs.codes, torch.int64, (B, H, N)),
        centroids=(inputs.centroids, torch.int64, (B, H, C)),
        valid=(inputs.valid, torch.bool, (B, N)),
    )
    assert outputs[1].shape[3] == WORD
    interface.run(
        "assign_codes",
        **{"B": B, "H": H, "N": N, "clusters": C, "threads": interface.threads(B * H * N * C)},
        **{"codes": inputs.codes, "centroids": inputs.centroids, "valid": inputs.valid},
        **{"labels": outputs[0], "votes": outputs[1]},
    )


@labels_of_means.on("cpu")
def labels(assigned: Tensor, inputs: Any) -> None:
    """The CPU backend of `assign_means`."""
    (B, H, N, D), C = inputs.x.shape, inputs.halves.shape[2]
    interface.check(
        "assign_means",
        mean=(inputs.mean, torch.float64, (B, H, D)),
        directions=(inputs.directions, torch.float32, (B, H, D, C)),
        halves=(inputs.halves, torch.float32, (B, H, C)),
        valid=(inputs.valid, torch.bool, (B, N)),
    )
    interface.run(
        "assign_means",
        **{"B": B, "H": H, "N": N, "D": D, "clusters": C, "dtype": inputs.x.dtype},
        threads=interface.threads(2 * B * H * N * D * C),
        **{"x": inputs.x, "mean": inputs.mean, "directions": inputs.directions, "halves": inputs.halves},
        **{"valid": inputs.valid, "labels": assigned},
    )
