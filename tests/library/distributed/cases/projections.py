"""Sums over all tokens, by projections, segments and landmarks."""

from tests.library.distributed.ranks import UNEVEN, Case, Sent

LINFORMERS = (
    "linformer:k=5",
    "linformer:k=5,ends=pooled,sharing=none",
    "linformer:k=5,start=random,sharing=key-value",
    "linformer:k=5,projection=convolution",
)

CASES = [
    *(Case(name, "summary", mask, kv_heads=2) for name in LINFORMERS for mask in ("padded", "causal left")),
    *(Case(f"linformer:k={k},projection=mean-pool", "summary", "padded", lse=True) for k in (5, 60)),
    *(Case("linformer:k=5", "summary", mask, lengths=UNEVEN, lse=True) for mask in ("none", "causal", "lengths")),
    Case("linformer:k=5", "summary", keys=31),
    *(Case(f"nystrom:landmarks={n}", "summary", mask, kv_heads=2) for n in (6, 40) for mask in ("none", "padded")),
    Case("nystrom:landmarks=6,convolution=5", "summary", "padded", lengths=UNEVEN),
    Case("nystrom:landmarks=6", "summary", keys=31, kv_heads=3),
    Case("nystrom:landmarks=60", "summary", lengths=UNEVEN),
    *(Case("rfa:features=96", "summary", mask, kv_heads=2) for mask in ("padded", "causal left")),
    Case("rfa:features=96,gates=none", "summary", "causal", lengths=UNEVEN),
    Case("rfa:features=96", "summary", keys=31),
]
REFUSED = [Case("linformer:k=5", "summary", "segments")]
SENT = [
    Sent("linformer:k=8", "summary", 2),
    Sent("linformer:k=8", "summary", 2, causal=True),
    Sent("nystrom:landmarks=8", "summary", 4),
    Sent("nystrom:landmarks=8,convolution=5", "summary", 6),
    Sent("rfa:features=8", "summary", 2),
    Sent("rfa:features=8", "summary", 2, causal=True),
]
