"""Keys and values that go from rank to rank."""

import torch

from tests.library.distributed.ranks import UNEVEN, Case, Sent

MASKS = "none", "causal", "padded", "lengths", "causal left", "window", "segments"

CASES = [
    *(Case("full", "ring", mask, kv_heads=2, lse=True) for mask in MASKS),
    *(Case("full", "ring", mask, lengths=UNEVEN, lse=mask == "none") for mask in ("none", "causal", "padded")),
    Case("full", "ring", keys=31, kv_heads=3),
    Case("full", "ring", "causal window", lengths=UNEVEN),
    Case("full", heads=2, kv_heads=1),  # fewer heads than ranks
    Case("full", "ring", "causal", dtype=torch.bfloat16),
    Case("full", "ring", "causal", dtype=torch.float64),
    Case("shared-full", "ring", "causal"),
]
REFUSED = [Case("full", "summary"), Case("linear", "ring")]
# With 3 ranks, keys and values are passed on twice forward and twice backward, and their gradients three times.
SENT = [Sent("full", "ring", 7)]
