"""How should the buckets, keys and cells of "lha-tail" grow with the length?

    python benchmarks/hash_growth.py TEXT --lengths 512,1024 --steps 60 \
        --methods "lha-tail:buckets=32,keys=96,cells=32 lha-tail:buckets=64,keys=96,cells=32"

Fits each method to the encoder of the demo extra at each length and prints the relative error of the attention outputs
on held-out passages, mean over layers. Positions past the model's own are interpolated, which stretches what a head
looks at as well: text models made for the length should need less growth.
"""

import argparse
import copy
import tempfile
from dataclasses import replace
from pathlib import Path

from subquad import hf
from subquad.methods import parse_method
from subquad.tools.calibrate.run import fit, mean_at
from subquad.tools.data.texts import read_documents
from subquad.tools.models.pretrained import load
from subquad.tools.runs.settings import CalibrateSettings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("--lengths", default="512,1024")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--methods", default="lha-tail")
    asked = parser.parse_args()
    documents, own = read_documents([asked.text]), load(None)
    for length in map(int, asked.lengths.split(",")):
        longer = hf.extend_positions(copy.deepcopy(own.model), length)
        model = replace(own, model=longer, limit=max(length, own.limit or 0))
        for name in asked.methods.split():
            settings = CalibrateSettings(method=name, text=(asked.text,), steps=asked.steps, max_length=length)
            with tempfile.TemporaryDirectory() as folder:
                fitted = fit(settings, parse_method(name), model, documents, Path(folder), lambda *_: None)
            history = fitted.record["history"]
            print(f"{length:6} {name:46} error {mean_at(history[-1], 'error'):.3f}", flush=True)


if __name__ == "__main__":
    main()
