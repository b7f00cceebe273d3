import subquad as sq
from tests.contract import MethodContract
from tests.decoding_contract import DecodingContract

VARIANTS = [  # settings that change what a method does, beside each method's example
    "lsh:buckets=0,bucket_size=8,merge=union",
    "lsh:buckets=4,hash=random",
    "lsh:buckets=3,tail=3",
    "lsh:buckets=4,hash=random,tail=2",
    "lsh:buckets=3,selection=argmax",
    "lsh:buckets=3,hash=random,selection=argmax",
    "lha:buckets=3,hidden=8,selection=argmax",
    "lha:buckets=4,hash=linear,merge=union,enlarge=1.0",
    "lha:buckets=0,bucket_size=8,hidden=8",
    "local:window=1",
    "local:window=17",
    "local:window=3,positions=relative",
    "full:positions=relative",
    "mixed-heads:methods=local:window=3+clustered:clusters=5;bits=15;iterations=3",
    "mixed-heads:methods=local:window=3;positions=relative+oracle-top:topk=4",
    "mixed-heads:methods=lha:buckets=0;bucket_size=8;hidden=8+local:window=5",
    "by-length:steps=0:full+9:linear+17:local:window=3",
    "by-length:steps=0:linear+10:lha:buckets=3;hidden=8",
    "smyrf:cluster_size=7,rounds=1",
    "reformer:rounds=1,chunk=3,buckets=6",
    "routing:clusters=5,cluster_size=4",
    "cluster-former:window=0,chunk=9,clusters=3",
    "sinkhorn:block=5,cut=2,iterations=5",
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
    "linformer:k=5,projection=convolution,sharing=none,start=random,ends=pooled",
    "linformer:k=5,projection=mean-pool",
    "linformer:k=5,projection=mean-pool,ends=pooled",
    "nystrom:landmarks=7,iterations=3",
    "nystrom:landmarks=5,convolution=4",
    "tilted-pool:pools=4,window=2,sinks=2",
    "tilted-pool:pools=7,window=0",
    "tilted-pool:pools=0,window=5",
    "learned-feature-map:features=7,window=3,sinks=2",
    "learned-feature-map:features=12,window=0,sinks=0",
    "learned-feature-map:features=12,window=0,sinks=2",
]


OF_OTHER_CODE = (  # than their method's example
    "lsh:buckets=4,hash=random,tail=2",
    "lsh:buckets=3,selection=argmax",
    "lha:buckets=3,hidden=8,selection=argmax",
    "local:window=3,positions=relative",
    "mixed-heads:methods=local:window=3+clustered:clusters=5;bits=15;iterations=3",
    "performer:features=9,kind=relu",
    "performer:features=16,kind=favor++,norm=30.0",
    "linformer:k=5,sharing=key-value,start=random,ends=pooled",
    "linformer:k=5,projection=convolution",
    "nystrom:landmarks=5,convolution=4",
    "tilted-pool:pools=0,window=5",
    "learned-feature-map:features=12,window=0,sinks=2",
)


class TestEveryMethod(MethodContract, DecodingContract):
    methods = [  # noqa: RUF012
        *(sq.from_dict({"name": name, **sq.METHODS[name].traits.example}) for name in sq.list_methods()),
        *map(sq.parse_method, VARIANTS),
    ]
    sampled = tuple(sq.parse_method(text) for text in VARIANTS if text not in OF_OTHER_CODE)
