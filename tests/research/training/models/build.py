"""Models of a few units, and inputs for them."""

import torch

from subquad.nn.auxiliary import has_auxiliary_loss, with_auxiliary_loss
from subquad.research.training.models import EncoderClassifier, EncoderConfig, MaskedSymbolEncoder

SIZES = {
    "vocab_size": 20,
    "num_labels": 3,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 48,
    "hidden_dropout": 0.0,
    "initializer_range": 0.3,  # large enough that attention matters
}
KINDS = (EncoderClassifier, MaskedSymbolEncoder)

# Every method, small enough that 20 tokens are many.
SMALL = {
    "full": "",
    "shared-full": "",
    "oracle-top": "topk=4",
    "clustered": "clusters=3,iterations=2",
    "i-clustered": "clusters=3,iterations=2,topk=4",
    "clustered-tail": "clusters=3,topk=4,cells=3",
    "lsh": "buckets=3",
    "lha": "buckets=3,hidden=8",
    "lha-tail": "buckets=3,keys=6,cells=3,hidden=8",
    "local": "window=3,positions=relative",
    "keep": "first=2,every=4",
    "sum": "terms=local:window=2+keep:first=1",
    "by-length": "steps=0:full+5:local:window=3",
    "mixed-heads": "methods=local:window=3;positions=relative+lha:buckets=3;hidden=8",
    "smyrf": "clusters=3",
    "reformer": "rounds=2,chunk=4,buckets=4",
    "routing": "clusters=3",
    "cluster-former": "window=2,chunk=4,clusters=3",
    "sinkhorn": "block=4",
    "longformer": "window=3,first=1",
    "bigbird": "block=3,random=1",
    "strided": "stride=4",
    "fixed": "block=4,columns=1",
    "logsparse": "window=2",
    "performer": "features=8,redraw=2",
    "linear": "",
    "rfa": "features=8",
    "linformer": "k=4",
    "nystrom": "landmarks=4",
    "tilted-pool": "pools=4,window=2,sinks=1",
    "probsparse": "factor=2",
    "adaptive-span": "span=12,ramp=3,start=2",
    "synthesizer": "logits=random-and-dot",
    "learned-feature-map": "features=4,window=2,sinks=1",
}
METHODS = {name: f"{name}:{settings}" if settings else name for name, settings in SMALL.items()}


def build(kind=EncoderClassifier, method="full", seed=0, **more):
    torch.manual_seed(seed)
    return kind(EncoderConfig(**SIZES | {"method": method} | more)).eval()


def symbols(batch=2, length=20, seed=1):
    return torch.randint(1, 20, (batch, length), generator=torch.Generator().manual_seed(seed))


def batch_for(kind, **sizes):
    ids = symbols(**sizes)
    return {"input_ids": ids, "labels": ids[:, 0] % 3 if kind is EncoderClassifier else ids}


def whole_loss(model, batch):
    """The task's, with the auxiliary one where there is one."""
    loss = model(**batch).loss
    return with_auxiliary_loss(loss, model, 0.5) if model.training and has_auxiliary_loss(model) else loss


def a_few_steps(model, batch, steps=3):
    """So that what was learned is not what it starts with."""
    optimiser = torch.optim.AdamW(model.train().parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = whole_loss(model, batch)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    model.eval()
    return losses


def assert_same_state(model, other):
    """Parameters and buffers, those too that no file holds."""
    kept, found = (dict([*m.named_parameters(), *m.named_buffers()]) for m in (model, other))
    assert kept.keys() == found.keys()
    for name in kept:
        assert torch.equal(kept[name], found[name]), name
