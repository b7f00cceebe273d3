"""Blocks of real tokens near a query, from the ranks beside it, and sums over all others."""

from tests.library.distributed.ranks import UNEVEN, Case, Sent

NAME = "learned-feature-map:features=12"

CASES = [
    *(
        Case(f"{NAME},window=4", "summary", mask, kv_heads=2, lse=True)
        for mask in ("none", "causal", "padded", "causal left")
    ),
    *(Case(f"{NAME},window=3,sinks=2", "summary", mask, lengths=UNEVEN) for mask in ("none", "causal", "lengths")),
    Case(f"{NAME},window=60", "summary", "padded"),
    *(Case(f"{NAME},window=0,sinks=2", "summary", mask, lse=True) for mask in ("padded", "causal left")),
    Case(f"{NAME},window=0,sinks=0", "summary", keys=31),
    *(
        Case(f"tilted-pool:{how}", "summary", mask, kv_heads=2, lse=True)
        for how in (
            "pools=6,window=3",
            "pools=3,window=4",
            "pools=2,window=1,sinks=0",
            "pools=20,window=5,sinks=2",
            "pools=0,window=3",
        )
        for mask in ("none", "padded")
    ),
    *(Case("tilted-pool:pools=3,window=2", "summary", mask, lengths=UNEVEN) for mask in ("none", "lengths")),
    Case("tilted-pool:pools=5,window=60", "summary"),
    Case("tilted-pool:pools=5,window=0", "summary", keys=31, lse=True),
    Case("tilted-pool:pools=60,window=0,sinks=2", "summary", "padded"),
]
REFUSED: list[Case] = []
SENT = [
    Sent(f"{NAME},window=4", "summary", 2),
    Sent(f"{NAME},window=4", "summary", 2, causal=True),
    Sent(f"{NAME},window=0,sinks=1", "summary", 4),
    Sent("tilted-pool:pools=4,window=4", "summary", 2),
    Sent("tilted-pool:pools=4,window=0", "summary", 2),
]
