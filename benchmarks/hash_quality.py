"""The effect of the hash: clustered attention in a pretrained encoder, with the paper's hash and with ours.

    python benchmarks/hash_quality.py [--text PATH --text …] [--length 512] [--items 24]

Prints the mean cosine of final embeddings to the exact model's, for k-means on

    paper       signs of independent Gaussian projections of the queries as they are (Vyas et al. 2020)
    centred     the same, of queries less their mean
    subquad     centred, with orthogonal directions: what the library does
    Euclidean   the library's, then Lloyd's algorithm on the queries themselves (`refine`): what hashing gives up
"""

from pathlib import Path
from typing import Annotated
from unittest.mock import patch

import sheet
import torch
import typer

from subquad.kernels.attention.clustered import reference as clustered
from subquad.kernels.dispatch import use_backend
from subquad.kernels.selection.clusters.op import query_clusters
from subquad.kernels.selection.hashing import reference
from subquad.kernels.selection.hashing.op import hash_codes
from subquad.kernels.selection.kmeans.op import hamming_kmeans
from subquad.tools.data.texts import read_documents, standard_library
from subquad.tools.measure.fidelity import cosine
from subquad.tools.models.passages import read
from subquad.tools.models.pretrained import load, running
from subquad.tools.runs import machine

OURS = clustered.cluster_queries  # of the plain PyTorch, which looks it up in its module
METHODS = ("clustered:clusters=25", "i-clustered:clusters=25", "i-clustered:clusters=50")


def independent(seed, rows, columns, like):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64).to(like)


def hamming(centre, directions):
    def labels(query, valid, *, clusters, bits, iterations, seed):
        with patch.object(reference, "orthogonal", directions):
            codes = hash_codes(query, bits, seed, centre=centre, valid=valid)
        return hamming_kmeans(codes, valid, clusters, bits, iterations)

    return labels


def euclidean(query, valid, *, iterations, **settings):
    return query_clusters(
        query, query, valid, valid, space="queries", iterations=iterations, refine=iterations, **settings
    )


HASHES = {
    "paper": hamming(False, independent),
    "centred": hamming(True, independent),
    "subquad": OURS,
    "Euclidean": euclidean,
}


def main(
    text: Annotated[list[Path] | None, typer.Option(help="a file or folder; repeatable")] = None,
    length: int = 512,
    items: int = 24,
) -> None:
    pretrained = load(None)
    documents = read_documents(text) if text else standard_library()
    passages = read(pretrained, documents, length, items, seed=0).passages
    exact = torch.cat([pretrained.embed([item]) for item in passages])
    print(f"{len(passages)} passages, {sum(map(len, passages)) / len(passages):.0f} tokens each; {machine.versions()}")
    print(f"{'':<12}" + "".join(f"{method:>26}" for method in METHODS))
    for name, labels in HASHES.items():
        row = []
        for method in METHODS:
            with (
                use_backend("reference"),  # compiled code clusters by itself
                patch.object(clustered, "cluster_queries", labels),
                running(pretrained.model, method),
            ):
                row.append(float(cosine(torch.cat([pretrained.embed([item]) for item in passages]), exact).mean()))
        print(f"{name:<12}" + "".join(f"{value:>26.4f}" for value in row))


if __name__ == "__main__":
    sheet.run(main)
