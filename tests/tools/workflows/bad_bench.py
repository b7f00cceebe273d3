"""Input that `subquad bench` must refuse: arguments, and files that are no results, by the message about them."""

import json


def damaged(tmp_path):
    """Files that are no results of a benchmark, by what is said about them."""
    cell = {"method": "full", "dtype": "float32", "passes": "forward", "length": 16, "status": "measured"}
    times = {"ms": 1.0, "ms_low": 1.0, "ms_high": 1.0}
    shape = {"batch": 1, "heads": 2, "head_dim": 8, "device": "cpu"}
    whole = {
        "kind": "subquad bench", "schema": 1, "created": "", "hardware": {}, "versions": {},
        "settings": shape,
        "backend": "cpu", "cells": [cell | times],
    }  # fmt: skip
    contents = {
        "is not JSON": "{oops",
        "is not from `subquad bench`": '{"methods": []}',
        "has schema 2 but this version reads 1": json.dumps(whole | {"schema": 2}),
        "its 'cells' is not of type list": json.dumps(whole | {"cells": {}}),
        "has heads 12 but this run 2; they must match": json.dumps(whole | {"settings": shape | {"heads": 12}}),
        "has head-dim 64 but this run 8": json.dumps(whole | {"settings": shape | {"head_dim": 64}}),
        "has batch None but this run 1": json.dumps(whole | {"settings": {}}),
        "was measured causal but this run is not causal": json.dumps(whole | {"settings": shape | {"causal": True}}),
        "measured on cuda:0 but this run is on cpu": json.dumps(whole | {"settings": shape | {"device": "cuda:0"}}),
        "'length' of cell 0 is not of type int": json.dumps(whole | {"cells": [cell | times | {"length": "16"}]}),
        "'method' of cell 0 is not of type str": json.dumps(whole | {"cells": [7]}),
        "'ms_low' of cell 0 is not a number": json.dumps(whole | {"cells": [cell | times | {"ms_low": "1"}]}),
        "cell 0 is measured, but has no times": json.dumps(whole | {"cells": [cell]}),
        "has a speed-up without its quartiles": json.dumps(whole | {"cells": [cell | times | {"speedup": 2.0}]}),
    }
    for number, (message, text) in enumerate(contents.items()):
        path = tmp_path / f"{number}.json"
        path.write_text(text)
        yield message, ["--compare", str(path)]
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\0")
    yield "is not JSON", ["--compare", str(tmp_path / "binary.json")]
    (tmp_path / "whole.json").write_text(json.dumps(whole))
    yield "measured on cpu but this run is on gpu", ["--compare", str(tmp_path / "whole.json"), "--device", "gpu"]


def bad_inputs(tmp_path):
    (tmp_path / "file").write_text("")
    yield from damaged(tmp_path)
    yield "no file or folder at", ["--compare", str(tmp_path / "missing.json")]
    yield "did you mean 'clustered'", ["--methods", "clusterd"]
    yield "clusters=0, but it must be a whole number ≥ 1", ["--methods", "clustered:clusters=0"]
    yield "no dtype 'int8'; there are float32, bfloat16, float16, float64", ["--dtypes", "float32,int8"]
    yield "no dtype 'float23'; did you mean 'float32'?", ["--dtypes", "float23"]
    yield "no pass 'sideways'; there are forward, forward+backward", ["--passes", "sideways"]
    yield "has an empty place between its commas", ["--passes", ","]
    yield "--dtypes is empty", ["--dtypes", ""]
    yield "--lengths is empty", ["--lengths", " "]
    yield "length '12x' is not a whole number", ["--lengths", "16,12x"]
    yield "length 0 must be at least 1", ["--lengths", "16,0"]
    yield "length -4 must be at least 1", ["--lengths", "-4"]
    yield "heads 0 must be at least 1", ["--heads", "0"]
    yield "batch 0 must be at least 1", ["--batch", "0"]
    yield "head-dim -1 must be at least 1", ["--head-dim", "-1"]
    yield "no memory has room for more than", ["--batch", "9" * 25]
    yield "no memory has room for more than", ["--lengths", "16," + "9" * 25]
    yield "threads 99999 must be at most 4,096", ["--threads", "99999"]
    yield "must be less than 2⁶³", ["--seed", "9" * 25]
    yield "threads 0 must be at least 1", ["--threads", "0"]
    yield "call-limit 0 must be above 0 seconds", ["--call-limit", "0"]
    yield "call-limit inf must be above 0 seconds and finite", ["--call-limit", "inf"]
    yield "cannot time device 'tpu9': only cpu and cuda", ["--device", "tpu9"]
    yield "cannot time device 'meta'", ["--device", "meta"]
    yield "is a file; give a folder", ["--out", str(tmp_path / "file")]
    yield "cannot write to the folder", ["--out", str(tmp_path / "file" / "below")]
