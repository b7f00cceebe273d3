"""Layers with parameters, heads that differ, and the options of a call, by heads."""

import torch

from tests.library.distributed.layers import Layer
from tests.library.distributed.ranks import UNEVEN, Sent

# Methods of which each rank needs to know which heads it runs.
DIFFERENT = (
    "bigbird:block=4,random=1",
    "fixed:block=4,columns=1,sets=heads",
    "strided:stride=4,sets=heads",
    "probsparse:factor=2",
)
LEARNED = (
    "full:positions=relative",
    "synthesizer:logits=random-and-dot,rank=3",
    "synthesizer:logits=factorised-dense,rank=3",
    "lha:buckets=4,hidden=8",
    "lha-tail:buckets=4,keys=6,cells=3,hidden=8",
    "routing:clusters=4",
    "sinkhorn:block=8",
    "adaptive-span:span=9,ramp=3,start=2",
    "local:window=4,positions=relative",
    "learned-feature-map:features=8,window=4",
    "performer:features=16,inputs=learned",
    "rfa:features=16",
    "linformer:k=5,sharing=none",
    "linformer:k=5,sharing=key-value,projection=convolution",
    "nystrom:landmarks=5,convolution=3",
    "tilted-pool:pools=6,window=3",
    "by-length:steps=0:full+20:lha:buckets=2;hidden=8",
    "local:window=2+lha:buckets=2,hidden=8",
)
MIXED = "mixed-heads:methods=2*local:window=4;positions=relative+3*lha:buckets=4;hidden=8"

CASES = [
    *(Layer(name) for name in (*DIFFERENT, *LEARNED)),
    Layer(MIXED, training=True),
    *(Layer(name, heads=4, kv_heads=2) for name in ("rfa:features=16", "tilted-pool:pools=6,window=3", LEARNED[3])),
    *(Layer(name, training=True) for name in ("lha:buckets=4,hidden=8", "sinkhorn:block=8", "adaptive-span:span=9")),
    Layer("sinkhorn:block=8", heads=2, kv_heads=1, training=True),  # a rank has no heads
    Layer("linformer:k=5", mask="causal left", lengths=UNEVEN),
    Layer("lha:buckets=4,hidden=8", mask="segments", training=True),
    Layer("full", options="bias dense lse"),
    Layer("full", options="one bias", heads=2, kv_heads=1, mask="padded"),
    Layer("full", options="offset", mask="causal"),
    Layer("full", "auto", options="dense bias", mask="segments", heads=2, kv_heads=1),  # fewer heads than ranks
    Layer("local:window=4", options="kept bools lse", mask="padded"),
    Layer("i-clustered:clusters=5,topk=4", options="keep", lengths=UNEVEN),
    Layer("lha:buckets=4,hidden=8", options="autocast", dtype=torch.bfloat16),
    Layer("performer:features=16", "summary", options="autocast", dtype=torch.bfloat16),
]
REFUSED = [
    Layer("routing:clusters=4", training=True),
    Layer("sinkhorn:block=8", mode="summary"),
    Layer("full", "ring", options="dense", mask="segments"),
]
SENT: list[Sent] = []
