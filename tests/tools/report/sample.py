"""Reports as `subquad compare` writes them, as plain data, with made-up but plausible figures."""

import math
from typing import Any

from subquad.tools.compare.schema import Report
from subquad.tools.measure.fidelity import crossover
from subquad.tools.measure.noise import MachineLoad, noise_of
from subquad.tools.runs.records import from_plain, to_plain

NOISE = 1.03  # how far exact attention differs from itself
OWN, LENGTHS, OP_LENGTHS = 512, (512, 2048, 4096), (512, 1024, 2048, 4096, 8192, 16384)
EXACT_MS = {512: 41.0, 2048: 214.0, 4096: 640.0}
REFUSAL = "'clustered' looks at the future when it chooses clusters, and this model is causal; use method='full' here"

# method: (cosine at 512, 2048, 4096; ms per token of the op; share of exact's time at which it is quadratic)
ENCODER = {
    "shared-full": ((0.7120, 0.6504, 0.6010), 0.0, 1.0),
    "oracle-top:topk=32": ((0.9987, 0.9921, 0.9876), 0.0, 14.0),
    "clustered:clusters=25": ((0.9312, 0.9205, 0.9120), 6.0e-4, 0.02),
    "clustered:clusters=100": ((0.9671, 0.9500, 0.9433), 1.1e-3, 0.05),
    "i-clustered:clusters=25,topk=32": ((0.9854, 0.9702, 0.9655), 1.5e-3, 0.04),
    "i-clustered:clusters=25,topk=64": ((0.9919, 0.9811, 0.9780), 2.1e-3, 0.06),
    "i-clustered:clusters=50,topk=32": ((0.9903, 0.9833, 0.9791), 2.0e-3, 0.06),
    "i-clustered:clusters=100,topk=32": ((0.9958, 0.9920, 0.9902), 2.4e-3, 0.08),
}


def record(plain: Any) -> Report:
    """The report that was read from this plain data."""
    report: Report = from_plain(Report, plain)
    return report


def encoder() -> dict[str, Any]:
    """An embedding model: nine methods, one of them refused and one in a part of the layers, with a labelled task."""
    methods = [_exact({"cosine_mean": 1.0, "cosine_p5": 1.0, "top1": 1.0, "recall10": 1.0}, LENGTHS)]
    methods[0]["task"] = {"accuracy": 0.9312}
    methods += [_measured(name, *figures) for name, figures in ENCODER.items()]
    methods[3] |= {"layers": [0, 1, 2, 3], "reason": "layers 4, 5 stay exact: their heads are 8 wide"}
    methods.append(_refused("lha:buckets=8", "'lha' has learned parameters; fit them with `subquad calibrate` first"))
    report = _around("all-MiniLM-L6-v2", "embedding", methods)
    report["task"] = {
        "name": "banking77",
        "metric": "intent accuracy of a logistic probe on frozen embeddings",
        "examples": 13083,
        "baselines": {"majority class": 0.013},
    }
    best = "i-clustered:clusters=100,topk=32"
    report["recommendation"] = {
        "choice": best,
        "by_length": {"512": "full", "2048": best, "4096": best},
        "headline": f"Use {best}: 1.13× the speed of exact attention, fidelity 0.992 at 2048 tokens.",
        "reasons": [
            "512 tokens: exact attention is fastest at fidelity ≥ 0.99.",
            f"2048 tokens: {best} is the fastest with fidelity ≥ 0.99.",
            f"4096 tokens: {best} is the fastest with fidelity ≥ 0.99: 1.34× the speed of exact attention.",
        ],
    }
    return report


def causal() -> dict[str, Any]:
    """A causal language model, in which only exact attention and the oracle run."""
    exact = _exact({"perplexity": 24.31}, LENGTHS[:2])
    exact["quality"]["2048"] = {"perplexity": 31.02}
    oracle = _measured("oracle-top:topk=32", (0.0, 0.0, 0.0), 0.0, 14.0) | {"fidelity": {"512": 0.9861, "2048": 0.9512}}
    del oracle["model"]["4096"], oracle["task"]
    oracle["quality"] = {
        "512": {
            "perplexity": 24.65,
            "layer_error": {"0": 0.031, "1": 0.052, "2": 0.048, "3": 0.044},
            "weights_l1": 0.11,
        },
        "2048": {"perplexity": 32.61},
    }
    refused = [_refused(name, REFUSAL) for name in ENCODER if name not in ("oracle-top:topk=32", "shared-full")]
    report = _around("gpt2", "causal-lm", [exact, oracle, *refused])
    report["recommendation"] = {
        "choice": "full",
        "headline": "Stay with exact attention at 512 and 2,048 tokens.",
        "reasons": ["512 tokens: no method reaches fidelity 0.99; the closest is oracle-top:topk=32."],
    }
    return report


def with_requests() -> dict[str, Any]:
    """The causal language model with times of whole requests after one of its lengths."""
    report = causal()
    report["requests"] = {
        "new_tokens": 128,
        "prompts": {"512": 384},
        "cache_mib": {"512": {"fp32": 36.0}},
        "steps": "Steps are exact attention by construction.",
        "refused": {},
    }
    for method in report["methods"][:2]:
        method["step"] = {"512": _cost(21.0, 20.0, 0.0)}
        method["request"] = {"512": _cost(2600.0, 2500.0, 24.0) | {"new_tokens": 128}}
    return report


def _around(name: str, kind: str, methods: list[dict[str, Any]]) -> Any:
    return {
        "created": "2026-03-14T09:26:53+00:00",
        "command": "subquad compare --task banking77 --data-dir data",
        "versions": {"python": "3.11.7", "subquad": "0.1.0", "torch": "2.13.0", "transformers": "5.20.0"},
        "hardware": {"processor": "Example CPU @ 2.6 GHz", "cores": "8", "threads": "4", "cpu_capability": "AVX512"},
        "settings": {
            "max_length": OWN,
            "lengths": list(LENGTHS),
            "op_lengths": list(OP_LENGTHS),
            "min_fidelity": 0.99,
            "floor": {"figure": "fidelity", "bound": 0.99},
            "seed": 0,
            "passages": 48,
            "sequences": {"2048": 5, "4096": 1},
        },
        "noise": {
            **to_plain(noise_of(MachineLoad(0.02, 0.3, 8), [NOISE])),
            "model": {str(n): NOISE for n in LENGTHS},
            "op": {str(n): NOISE for n in OP_LENGTHS},
        },
        "model": {
            "name": f"sentence-transformers/{name}",
            "class": "BertModel",
            "kind": kind,
            "parameters": 22713216,
            "dtype": "float32",
            "layers": [{"number": i, "name": f"encoder.layer.{i}.attention.self", "kind": "self"} for i in range(6)],
            "heads": 12,
            "head_dim": 32,
            "position_limit": 512,
        },
        "text": {"source": "the standard library's docstrings", "documents": 210, "passages": 48, "tokens": 120345},
        "methods": methods,
        "notes": [
            "Times are medians of runs in turn with exact attention (SDPA) on batches of one.",
            "The model's positions reach 512 tokens; beyond, they are interpolated without training.",
        ],
    }


def _exact(quality: dict[str, float], lengths: tuple[int, ...]) -> dict[str, Any]:
    return {
        "method": "full",
        "settings": {"name": "full"},
        "status": "exact",
        "layers": list(range(6)),
        "fidelity": {str(n): 1.0 for n in lengths},
        "quality": {str(n): quality for n in lengths},
        "model": {str(n): _cost(EXACT_MS[n], EXACT_MS[n], 20.0 * n / 512) for n in lengths},
        "op": {str(n): _cost(_exact_op(n), _exact_op(n), n / 256) for n in OP_LENGTHS},
    }


def _measured(name: str, cosines: tuple[float, ...], linear: float, quadratic: float) -> dict[str, Any]:
    loss = 1 - cosines[0]
    ms = {n: _op(n, linear, quadratic) for n in OP_LENGTHS if not (quadratic > 1 and n > 8192)}
    op = {str(n): _cost(t, _exact_op(n), n / 128) for n, t in ms.items()}
    longer = dict(zip(LENGTHS[1:], cosines[1:], strict=True))
    model = {n: EXACT_MS[n] + 6 * (ms[n] - _exact_op(n)) for n in LENGTHS}
    return {
        "method": name,
        "settings": {"name": name.partition(":")[0]},
        "status": "measured",
        "layers": list(range(6)),
        "fidelity": {str(n): c for n, c in zip(LENGTHS, cosines, strict=True)},
        "quality": {
            "512": {
                "cosine_mean": cosines[0],
                "cosine_p5": 1 - 2.2 * loss,
                "top1": 1 - 1.5 * loss,
                "recall10": 1 - 1.1 * loss,
                "layer_error": {str(i): 0.02 + 2.5 * loss * (1 + 0.4 * math.sin(2 * i + 40 * loss)) for i in range(6)},
                "weights_l1": min(2.0, 0.05 + 9 * loss),
            },
            **{str(n): {"cosine_mean": c, "cosine_p5": c - 0.03} for n, c in longer.items()},
        },
        "model": {str(n): _cost(t, EXACT_MS[n], 24.0 * n / 512) for n, t in model.items()},
        "op": op,
        "crossover": _crossover(op),
        "task": {"accuracy": 0.9312 - 0.4 * loss},
    }


def _refused(name: str, reason: str) -> dict[str, Any]:
    return {"method": name, "settings": {"name": name.partition(":")[0]}, "status": "refused", "reason": reason}


def _exact_op(n: int) -> float:
    return 2.4e-6 * n**2 + 0.15


def _op(n: int, linear: float, quadratic: float) -> float:
    return linear * n + quadratic * 2.4e-6 * n**2 + 0.2 * (1 + 500 * linear)


def _crossover(op: dict[str, Any]) -> float | None:
    ties = [int(n) for n, figures in op.items() if figures["verdict"] == "within the noise"]
    return crossover({int(n): figures["speedup"] for n, figures in op.items()}, ties)


def _cost(ms: float, exact: float, extra: float) -> dict[str, Any]:
    figures = {
        "ms": ms,
        "ms_low": 0.97 * ms,
        "ms_high": 1.05 * ms,
        "repeats": 8,
        "speedup": exact / ms,
        "extra_mib": extra,
    }
    tie = 1 / NOISE <= exact / ms <= NOISE
    verdict = "within the noise" if tie else "faster" if ms < exact else "slower"
    return figures if ms == exact else figures | {"verdict": verdict}
