"""Run `torch.library.opcheck` on every compiled op: schemas, autograd, shapes for the compiler, symbolic sizes."""

import torch

import subquad  # noqa: F401  (registers the ops)
from subquad.testing.oracle import qkv, tracked


def in_buckets(bias):
    """Arguments of bucket attention: two sets, of which one names the bucket of each block."""
    queries, keys = torch.arange(20).expand(2, 4, 1, -1), torch.arange(30).expand(2, 4, 1, -1)
    bucket = torch.zeros(2, 4, 1, dtype=torch.int64)
    offsets = torch.tensor([3, 5])
    bias = None if bias is None else bias.requires_grad_()
    return (
        bias,
        [queries] * 2,
        [keys] * 2,
        [bucket, torch.empty(0, dtype=torch.int64)],
        [-1, 7],
        offsets,
        None,
        0,
        True,
        False,
        0.3,
        None if bias is None else torch.zeros(2, 4, 1, 15).requires_grad_(),
    )


def main() -> None:
    torch.set_num_threads(1)
    ops, checked = torch.ops.subquad, 0
    valid = torch.arange(20).expand(2, -1) < 15, torch.arange(30).expand(2, -1) < 25
    for query_valid, key_valid in ((None, None), valid):
        for topk in (0, 6):
            for labels in (None, torch.arange(20).expand(2, 2, -1) % 4):
                settings = 4, topk, 31, 3, 0.3, 5, labels is not None
                arguments = "cpu", *tracked(*qkv(20, 30)), query_valid, key_valid, labels, *settings
                torch.library.opcheck(ops.clustered_forward.default, arguments)
                checked += 1
        q, k, v = qkv(20, 30)
        torch.library.opcheck(
            ops.cluster_labels.default, ("cpu", q, k, query_valid, key_valid, None, "logits", 4, 31, 3, 2, 5)
        )
        torch.library.opcheck(ops.cell_labels.default, ("cpu", k, v, key_valid, 3, 31, 3, 5))
        means, sizes = torch.randn(*q.shape[:2], 4, q.shape[3]), torch.ones(*q.shape[:2], 4, dtype=torch.int64)
        torch.library.opcheck(ops.nearest_labels.default, ("cpu", q, k, means, sizes, query_valid, key_valid))
        checked += 3
        query = qkv(20)[0]
        torch.library.opcheck(ops.hash_words.default, ("cpu", query, 31, 0, True, query_valid))
        torch.library.opcheck(
            ops.kmeans_labels.default,
            ("cpu", ops.hash_words("cpu", query, 31, 0, True, query_valid), query_valid, 4, 3),
        )
        checked += 2
    labels, cell = torch.arange(20).expand(2, 2, -1) % 4, torch.arange(30).expand(2, 2, -1) % 3
    others = tracked(torch.randn(2, 2, 4, 8), torch.randn(2, 2, 8, 8))
    listed = torch.arange(6).expand(2, 2, 4, -1)
    for keys, means, window in ((None, (None, None), 0), (listed, (None, None), 3), (None, others, 0)):
        start = torch.tensor([0, 4]) if window else None
        arguments = ("cpu", *tracked(*qkv(20, 30)), labels, cell, keys, None, None, *means, start, 4, 6, 3, 0.3, window)
        torch.library.opcheck(ops.tail_forward.default, arguments)
        torch.library.opcheck(ops.tail_output.default, ("cpu", *qkv(20, 30), *arguments[4:]))
        checked += 2
    for bias in (None, torch.zeros(2, 4, 30)):
        torch.library.opcheck(ops.pairs_forward.default, ("cpu", *tracked(*qkv(20, 30, H=4)), *in_buckets(bias)))
        checked += 1
    for valid in (None, torch.arange(20).expand(2, -1) < 15):
        torch.library.opcheck(ops.top_by_score.default, ("cpu", qkv(20)[0], torch.tensor([5, 3]), 5, valid, True))
        layers = [torch.zeros(3, 8, 7), torch.zeros(3, 7, 4)], [torch.zeros(3, 1, 7), torch.zeros(3, 1, 4)], [2]
        vectors, most = [qkv(20, H=3)[0]], torch.tensor([5, 3])
        torch.library.opcheck(ops.top_by_hash.default, ("cpu", vectors, *layers, 3, 0.3, most, 5, valid, True))
        torch.library.opcheck(ops.label_blocks.default, ("cpu", torch.arange(20).expand(2, 3, -1) % 5, 4, 8))
        checked += 3
    u, w, b = torch.zeros(4, 5, 8), torch.zeros(1, 5, 8), torch.zeros(4, 5)
    for maps in ((u, w, b, torch.zeros(2, 1, 20).requires_grad_()), (None,) * 4):
        for pattern in ((0, 0), (1, 0), (8, 2)):
            arguments = ("cpu", *tracked(*qkv(20, H=4, G=2)), *maps, *pattern)
            torch.library.opcheck(ops.features_forward.default, arguments)
            checked += 1
    torch.library.opcheck(ops.directed_product.default, ("cpu", *tracked(*qkv(20, H=4, G=2)), False))
    checked += 1 + of_ranks() + of_exact_attention()
    print("checked", checked)


def of_exact_attention() -> int:
    """Exact attention, and partials of windows merged; how many calls were checked."""
    ops = torch.ops.subquad
    for valid in (None, torch.arange(30).expand(2, -1) < 25):
        torch.library.opcheck(ops.exact_forward.default, ("cpu", *tracked(*qkv(20, 30)), valid, None, True, 10, 0.3))
    outs = tracked(torch.ones(4, 2, 5, 8), torch.ones(2, 2, 7, 8))
    lses = tracked(torch.ones(4, 2, 5), torch.ones(2, 2, 7))
    torch.library.opcheck(ops.merged_windows.default, ("cpu", outs, lses, [0, 5, 5, 2, 3, 7, 1, 1], 10, False))
    halves = tracked(*(x.detach().bfloat16() for x in outs))
    torch.library.opcheck(ops.merged_windows.default, ("cpu", halves, lses, [0, 5, 5, 2, 3, 7, 1, 1], 10, True))
    few, valid, at = qkv(3, 30, H=4, G=2), torch.arange(30).expand(2, -1) < 25, torch.tensor([5, 27])
    for options in ((None, None, None, False, 0, 0.3, None, None), (valid, valid[:, :3], at, True, -1, 0.3, 9, 2.0)):
        torch.library.opcheck(ops.steps_forward.default, ("cpu", *few, *options))
    return 6


def of_ranks() -> int:
    """Those over a rank's own tokens; how many calls were checked."""
    q, k, v = qkv(20)
    labels, lists = torch.arange(20).expand(2, 2, -1) % 5, torch.arange(20).view(4, 5).expand(2, 2, -1, -1)
    words, centroids = torch.arange(80).view(2, 2, 20), torch.arange(12).view(2, 2, 3)
    mean, factor = torch.zeros(2, 2, 8, dtype=torch.float64), torch.ones(2, 2, dtype=torch.float64)
    directions, halves = torch.ones(2, 2, 8, 3), torch.zeros(2, 2, 3)
    calls = [("listed_forward", (*tracked(q, k, v, torch.zeros(2, 2, 20)), labels, lists, 0.3))]
    calls += [("sums_and_sizes", (*tracked(q), labels, 4))]
    for valid in (None, torch.arange(20).expand(2, -1) < 15):
        calls += [
            ("means_and_squares", (q, valid)),
            ("words_of_terms", ([q], [mean], [factor], torch.ones(1, 1, 31, 8), valid)),
            ("labels_and_votes", (words, centroids, valid)),
            ("labels_of_means", (q, mean, directions, halves, valid)),
        ]
    for name, arguments in calls:
        torch.library.opcheck(getattr(torch.ops.subquad, name).default, ("cpu", *arguments))
    return len(calls)


if __name__ == "__main__":
    main()
