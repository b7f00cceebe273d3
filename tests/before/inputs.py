"""What the files of this folder were made of; `make.py` writes them, `tests/test_before.py` reads them."""

import torch
from torch import Tensor

METHODS = (  # of 24 tokens in two heads of width 8
    "full",
    "shared-full",
    "oracle-top:topk=4",
    "clustered:clusters=5,bits=15,iterations=3",
    "i-clustered:clusters=5,bits=15,iterations=3,topk=4",
    "lsh:buckets=4",
    "lha:buckets=4,hidden=8",
    "lha-tail:buckets=4,keys=6,cells=3,hidden=8",
    "local:window=4",
    "mixed-heads:methods=local:window=4+lha:buckets=4;hidden=8",
    "smyrf:clusters=4",
    "reformer:rounds=2,chunk=8",
    "routing:clusters=4",
    "cluster-former:window=2,chunk=5,clusters=4",
    "sinkhorn:block=8",
    "performer:features=16",
    "linear",
    "rfa:features=96",
    "linformer:k=5",
    "nystrom:landmarks=5",
    "tilted-pool:segments=6,window=3",
    "learned-feature-map:features=12,window=4",
    "lsh:buckets=0,bucket_size=8,merge=union",
    "lsh:buckets=4,hash=random",
    "lsh:buckets=3,tail=3",
    "lsh:buckets=4,hash=random,tail=2",
    "lsh:buckets=3,selection=argmax",
    "lsh:buckets=3,hash=random,selection=argmax",
    "lha:buckets=3,hidden=8,selection=argmax",
    "lha:buckets=4,hash=linear,enlarge=1.0,merge=union",
    "lha:buckets=0,bucket_size=8,hidden=8",
    "local:window=1",
    "local:window=17",
    "local:window=3,positions=relative",
    "mixed-heads:methods=local:window=3+clustered:clusters=5;bits=15;iterations=3",
    "mixed-heads:methods=local:window=3;positions=relative+oracle-top:topk=4",
    "mixed-heads:methods=lha:buckets=0;bucket_size=8;hidden=8+local:window=5",
    "smyrf:cluster_size=7,rounds=1",
    "reformer:rounds=1,chunk=3,buckets=6",
    "routing:clusters=5,window=4",
    "cluster-former:window=0,chunk=9,clusters=3",
    "sinkhorn:block=5,iterations=5,cut=2",
    "performer:features=8,kind=hyperbolic",
    "performer:features=12,kind=favor++,rows=iid",
    "performer:features=16,kind=favor++,norm=30.0",
    "performer:features=512,kind=trigonometric",
    "performer:features=9,kind=relu",
    "performer:features=16,inputs=learned,redraw=3",
    "rfa:features=96,gates=none",
    "linear:feature_map=exp",
    "linear:feature_map=softmax",
    "linformer:k=5,sharing=none,ends=pooled",
    "linformer:k=5,sharing=none,start=random",
    "linformer:k=5,sharing=key-value,start=random,ends=pooled",
    "linformer:k=5,projection=convolution",
    "linformer:k=5,sharing=none,projection=convolution,start=random,ends=pooled",
    "linformer:k=5,projection=mean-pool",
    "linformer:k=5,projection=mean-pool,ends=pooled",
    "nystrom:landmarks=7,iterations=3",
    "nystrom:landmarks=5,convolution=4",
    "tilted-pool:segments=4,window=2,sinks=2",
    "tilted-pool:segments=7,window=0",
    "tilted-pool:segments=0,window=5",
    "learned-feature-map:features=7,window=3,sinks=2",
    "learned-feature-map:features=12,window=0,sinks=0",
    "learned-feature-map:features=12,window=0,sinks=2",
    "i-clustered:clusters=5,bits=31,iterations=4,topk=6,seed=3",
    "lsh:buckets=4,bucket_size=6,tail=4,seed=2",
    "lha:buckets=4,targets=features,features=16,membership=argmax,seed=2",
    "lha-tail:buckets=3,keys=8,cells=4,hidden=8,hash=linear,seed=1",
    "sinkhorn:block=6,iterations=4,temperature=0.5,seed=2",
    "performer:features=16,redraw=100,seed=4",
    "tilted-pool:segments=6,window=2,sinks=2",
    "routing:clusters=4,window=9,seed=1",
    "mixed-heads:methods=routing:clusters=4;window=9+tilted-pool:segments=6;window=3",
)

LAYERS = (
    "lha:buckets=3,hidden=8",
    "linformer:k=6",
    "learned-feature-map:features=6,window=3",
    "tilted-pool:segments=6,window=2",
    "performer:features=16",
    "mixed-heads:methods=local:window=4+lha:buckets=3;hidden=8",
)
FITTED = {
    "lha": "lha:buckets=3,hidden=8",
    "linformer": "linformer:k=6",
    "learned-feature-map": "learned-feature-map:features=6,window=2",
    "mixed-heads": "mixed-heads:methods=tilted-pool:segments=6;window=2+local:window=4",
}
SWAPPED = ("i-clustered:clusters=4,topk=6", "performer:features=16")  # of the two layers

COMPARISON = {
    "methods": ("clustered:clusters=4", "lha:buckets=3,hidden=8"),
    "max_length": 48,
    "lengths": (96,),
    "op_lengths": (32,),
    "passages": 4,
}
FIT = {"method": "lha:buckets=3,hidden=8", "max_length": 48, "steps": 40}
INSPECTION = {"methods": ("lsh:buckets=4", "lha:buckets=4,hidden=4"), "sequences": 2, "tokens": 6, "length": 48}
TRAINING = (
    *("task.length=7", "task.examples=500", "model.layers=1", "model.heads=2", "model.width=16"),
    *("model.feed_forward=32", "model.method=lha:buckets=2", "model.dropout=0.1"),
    *("training.steps=24", "training.batch=8", "training.every=8", "training.learning_rate=0.003"),
    "training.evaluation_batch=256",
)
EXPERIMENTS = ("linformer-quality",)


def versions() -> dict[str, str]:
    return {"subquad": "0.1.0"}


def hardware(device: str = "cpu") -> dict[str, str]:
    return {"processor": "a CPU", "cores": "2", "threads": "1"}


def attention_inputs() -> list[Tensor]:
    draw = torch.Generator().manual_seed(5)
    return [torch.randn(1, 2, 24, 8, generator=draw) for _ in range(3)]


def hidden() -> Tensor:
    return torch.randn(1, 24, 16, generator=torch.Generator().manual_seed(6))


def tokens() -> dict[str, Tensor]:
    ids = torch.randint(5, 200, (2, 40), generator=torch.Generator().manual_seed(7))
    real = torch.ones_like(ids)
    ids[1, 30:] = real[1, 30:] = 0
    return {"input_ids": ids, "attention_mask": real}
