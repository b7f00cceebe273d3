"""An inspection as `subquad inspect` makes it, with figures that are easy to predict."""

import random

from subquad.tools.inspect.schema import InspectReport
from subquad.tools.runs.records import from_plain

LAYERS, HEADS, BUCKETS, LENGTH = 3, 4, 4, 64
# method -> (utility in layer 0 at N/B and as given; a tenth more in each next layer), keys
CHOOSING = {
    "lsh:buckets=4": ((0.3, 0.5), (20, 30)),
    "smyrf:clusters=4,rounds=1": ((0.2, 0.2), (16, 16)),
    "lha:buckets=4 (not calibrated)": ((0.25, 0.4), (18, 25)),
    "lha:buckets=4@fitted": ((0.5, 0.6), (18, 25)),
}


def report(
    hashing=("lsh:buckets=4", "lha:buckets=4@fitted"), choosing=CHOOSING, fits=0, spectrum=True
) -> InspectReport:
    methods = [method(name, *figures, hashes=name in hashing) for name, figures in choosing.items()]
    blind = {"method": "clustered:clusters=2", "settings": {"name": "clustered"}, "calibrated": None}
    blind["layers"] = {str(n): {} if n else {"reason": "it cannot"} for n in range(LAYERS)}
    tokens = ["[CLS]", "a$b", "##ing", "注意", "a-very-long-token-indeed", "'"]
    draw = random.Random(0)
    weights = {
        name: [[draw.random() / len(tokens) for _ in tokens] for _ in tokens]
        for name in ("full", *choosing, "clustered")
    }
    made = {
        "kind": "subquad inspect",
        "schema": 1,
        "created": "2026-03-14T09:26:53+00:00",
        "command": "subquad inspect --buckets 4",
        "versions": {"python": "3.11.7", "torch": "2.13.0"},
        "hardware": {"processor": "Example CPU @ 2.6 GHz"},
        "settings": {
            "buckets": BUCKETS, "length": LENGTH, "keys": 16, "sequences": 2, "layer": 1, "head": 0, "tokens": 6,
            "seed": 0,
        },
        "model": {"name": "some-org/a-model", "heads": HEADS, "layers": [{"number": n} for n in range(LAYERS)]},
        "text": {"source": "a [text]", "documents": 2, "tokens": 999},
        "bounds": {str(n): [0.8 + 0.05 * n] * HEADS for n in range(LAYERS)},
        "methods": [*methods, blind],
        "maps": {"layer": 1, "head": 0, "tokens": tokens, "weights": weights},
        "fits": [{"method": "lha:buckets=4@fitted", "buckets": 4, "history": record()}] * fits,
        "notes": ["clustered:clusters=2 chooses no keys [of its own]."],
    }  # fmt: skip
    return from_plain(InspectReport, made | ({"spectrum": spectra()} if spectrum else {}))


def spectra():
    """Y(j) = (j/64)^(1/p) with another p for each layer and head; 90 % at 10 + layer + head values."""
    at = [1, 4, 16, 32, 64]
    curves = [[[(j / 64) ** (1 / (1 + n + head)) for j in at] for head in range(HEADS)] for n in range(LAYERS)]
    needed = [[10.0 + n + head for head in range(HEADS)] for n in range(LAYERS)]
    layers = {str(n): {"curves": curves[n], "needed": needed[n]} for n in range(LAYERS)}
    return {"at": at, "index": 16, "layers": layers}


def method(name, utilities, keys, hashes):
    layers = {str(n): layer(n, utilities, keys, hashes) for n in range(LAYERS)}
    known = {"settings": {"name": name.partition(":")[0], "buckets": 4}, "calibrated": None}
    made = {"method": name, **known, "layers": layers}
    return made | ({"imbalance": layers["0"]["imbalance"]} if hashes else {})


def layer(number, utilities, keys, hashes):
    figures = {
        "utility": {
            variant: {
                "utility": [utility + 0.1 * number + 0.01 * (head - 1.5) for head in range(HEADS)],
                "keys": [float(count)] * HEADS,
                "bound": [0.9] * HEADS,
            }
            for variant, utility, count in zip(("n_b", "given"), utilities, keys, strict=True)
        }
    }
    if hashes:
        one = {"queries": [[10, 40, 0, 14]] * HEADS, "keys": [[30, 4, 0, 30]] * HEADS}
        figures |= {side: [of, of] for side, of in one.items()}
        figures["imbalance"] = {"size": 0.25, "size_of_filled": 0.0, "ratio": 0.75, "ratio_of_both": None}
    return figures


def record(layers=3, steps=5):
    """The record that fitting logs."""
    figures = {
        "loss": 1.0,
        "kl_query": 0.5,
        "kl_key": 0.25,
        "negative_entropy_query": -1.0,
        "negative_entropy_key": -0.5,
    }
    return [
        {
            "step": 10 * step,
            "layers": {str(n): {k: v * (1 + n) / (1 + step) for k, v in figures.items()} for n in range(layers)},
        }
        for step in range(steps)
    ]
