"""Keys near the borders of a rank's own."""

from tests.library.distributed.ranks import UNEVEN, Case, Sent

CASES = [
    *(
        Case(f"local:window={w}", "summary", mask)
        for w in (0, 4, 60)
        for mask in ("none", "causal", "padded", "causal left")
    ),
    Case("local:window=9", "summary", "window"),
    Case("local:window=9", "summary", lengths=UNEVEN, kv_heads=3),
    Case("local:window=25", "summary", "causal", lengths=UNEVEN),
]
REFUSED: list[Case] = []
SENT = [Sent("local:window=8", "summary", 2)]
