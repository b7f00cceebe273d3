import subquad as sq
from tests.contract import MethodContract

VARIANTS = [  # settings that change what a method does, beside each method's example
    "lha:buckets=3,hidden=8,selection=argmax",
    "lha:buckets=4,hash=linear,merge=union,enlarge=1.0",
    "lha:buckets=0,bucket_size=8,hidden=8",
    "local:window=1",
    "local:window=17",
    "local:window=3,positions=relative",
    "smyrf:cluster_size=7,rounds=1",
]


class TestEveryMethod(MethodContract):
    methods = [  # noqa: RUF012
        *(sq.from_dict({"name": name, **sq.METHODS[name].traits.example}) for name in sq.list_methods()),
        *map(sq.parse_method, VARIANTS),
    ]
