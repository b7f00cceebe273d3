"""Patterns by the keys near the borders of a rank's own, the tokens that all see, and packed segments."""

from tests.library.distributed.layers import Layer
from tests.library.distributed.ranks import UNEVEN, Case, Sent

GLOBAL = (
    "longformer:window=3,dilation=2,first=2",
    "longformer:window=2,first=25",
    "bigbird:block=4,random=0",
    "bigbird:block=3,window=0,random=0,first=2,last=2",
)
NEAR = ("fixed:block=7,columns=1,sets=near", "strided:stride=4,sets=near")
MASKS = "none", "left"
ADAPTIVE = "adaptive-span:span=9,ramp=3,start=4"

CASES = [
    *(Case(name, "summary", mask) for name in GLOBAL for mask in ("none", "causal", "padded", "causal left")),
    *(
        Case(name, "summary", mask, lengths=UNEVEN, kv_heads=3, lse=True)
        for name in GLOBAL
        for mask in ("none", "left")
    ),
    *(Case(name, "summary", mask) for name in NEAR for mask in ("none", "causal left")),
    *(Case(name, "summary", lengths=UNEVEN) for name in NEAR),
    *(Case(name, "summary", "segments") for name in ("local:window=4", "local:window=60", NEAR[1])),
    Case("local:window=4", "summary", "causal segments", lengths=UNEVEN, lse=True),
    Case("local:window=4", "auto", "mixed segments"),
    Layer(ADAPTIVE, "summary", "left", training=True),
    Layer(ADAPTIVE, "summary", "causal left", lengths=UNEVEN),
    Layer(ADAPTIVE, "summary", "left", options="kept bools", training=True),
    Layer("local:window=4,positions=relative", "summary", "segments"),
]
REFUSED = [
    Case("local:window=4", "summary", "mixed segments"),
    Case("longformer:window=4", "summary", "segments"),
    Case("longformer:window=4", "summary", "window"),
    Case("bigbird:block=4,random=1", "summary"),
    Case("strided:stride=4", "summary"),
    Case("logsparse", "summary"),
]
SENT = [
    Sent("longformer:window=4", "summary", 4),
    Sent("bigbird:block=4,random=0", "summary", 4),
    Sent("strided:stride=4,sets=near", "summary", 2),
]
