"""A benchmark as `subquad bench` makes it: SDPA's time grows as N², the methods' as N; they cross at 1,000 and 100."""

from subquad.tools.bench.crossovers import crossovers, growth
from subquad.tools.bench.schema import BenchCell, BenchReport
from subquad.tools.measure.noise import MachineLoad, noise_of
from subquad.tools.runs.records import from_plain

LENGTHS = (256, 512, 1024, 2048, 4096)
QUADRATIC_MS = 1e-5  # × N²
CROSS = {"clustered": 100.0, "i-clustered:clusters=25,topk=64": 1000.0}
NOISE = 1.02  # how far SDPA differs from itself
PANELS = [("float32", "forward"), ("float32", "forward+backward"), ("bfloat16", "forward")]


def report(lengths=LENGTHS, not_run=()) -> BenchReport:
    """All cells of three panels; `not_run` are (method, length)."""
    cells = [
        cell(method, dtype, passes, length, (method, length) in not_run, ("full", length) in not_run)
        for dtype, passes in PANELS
        for length in lengths
        for method in ("full", *CROSS)
    ]
    return BenchReport(
        created="2026-03-14T09:26:53+00:00",
        command="subquad bench --methods 'clustered i-clustered:clusters=25,topk=64'",
        versions={"python": "3.11.7", "torch": "2.13.0"},
        hardware={"processor": "Example CPU @ 2.6 GHz", "cores": "8", "threads": "4"},
        backend="cpu",
        backends={"reference": "available", "cpu": "available", "triton": "there is no GPU"},
        settings={
            "lengths": list(lengths), "device": "cpu", "batch": 2, "heads": 6, "head_dim": 64, "threads": 4, "seed": 0,
            "causal": False, "quick": False,
        },
        methods={"full": {"name": "full"}, "clustered": {"name": "clustered", "clusters": 100}},
        cells=cells,
        crossovers=crossovers(cells),
        notes=["Standard normal inputs [of q, k and v]."],
        noise=noise_of(MachineLoad(0.02, 0.3, 8), [NOISE]),
    )  # fmt: skip


def cell(method, dtype, passes, length, left_out=False, without_exact=False):
    """A cell; its quartiles lie 2 % beside the median."""
    found = {"method": method, "dtype": dtype, "passes": passes, "length": length, "status": "measured"}
    if left_out:
        return from_plain(BenchCell, found | {"status": "not run", "reason": "predicted 71 s per call"})
    exact = QUADRATIC_MS * length**2
    ms = exact if method == "full" else QUADRATIC_MS * length * CROSS[method]
    found |= {"ms": ms, "ms_low": 0.98 * ms, "ms_high": 1.02 * ms, "repeats": 21}
    found |= {"us_per_token": 1e3 * ms / (2 * length), "extra_bytes": 3000 * length, "bytes_per_token": 1500.0}
    found |= {"memory": "growth of the peak resident set"}
    if length > LENGTHS[0]:
        found["growth"] = growth({length // 2: ms / (4 if method == "full" else 2), length: ms})[length]
    if not without_exact:
        faster = exact / ms
        found |= {"speedup": faster, "speedup_low": 0.98 * faster, "speedup_high": 1.02 * faster}
        verdict = "within the noise" if 1 / NOISE <= faster <= NOISE else "faster" if faster > 1 else "slower"
        found |= {"noise": NOISE} if method == "full" else {"verdict": verdict}
    return from_plain(BenchCell, found)
