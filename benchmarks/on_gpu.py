"""Test and measure everything on a GPU, in one command, on a machine with PyTorch, Triton and transformers alone.

    PYTHONPATH=src python3 benchmarks/on_gpu.py --out DIR [--minutes 9]
    PYTHONPATH=src python3 benchmarks/on_gpu.py --out DIR --dry-run

Each part is a process of its own with a share of the time, and writes its file as soon as it has figures, so that a run
that is cut off leaves what it measured. A failure is a row of a table or a line of a log, not the end of the run.

part         share  what
environment         versions, the GPU, which backends run: environment.json
correctness   .40   the tests of the Triton kernels and the conformance tests of all methods on the GPU: tests-of-*.txt
headline      .40   methods against SDPA's flash and cuDNN kernels, then tiles: gpu-sheet.json, gpu-sheet.md
models        .14   whole models with random weights, SDPA against swapped methods: models.json, models.md
profile       .06   which kernels, ours and torch's, take the time of a call: profile.md

With --dry-run all of it runs at tiny sizes in Triton's interpreter, on the CPU.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sheet import table

SHARES = {"environment": 0.0, "correctness": 0.4, "headline": 0.4, "models": 0.14, "profile": 0.06}
LEAST_SECONDS = 30.0  # of a part: torch and transformers are imported in it
WORKERS = 12  # processes of tests, whose time is mostly that of Triton's compiler
ROOT = Path(__file__).resolve().parents[1]
TESTS = {
    "tests-of-kernels": [f"tests/library/triton/{name}" for name in ("cuda/test_methods.py", "interpreted")],
    "tests-of-methods": [f"tests/library/triton/cuda/{name}.py" for name in ("test_contract", "test_sheet")],
}
FEW = ["tests/library/triton/interpreted/test_top.py", "-k", "test_scores_are_ranked"]  # in a dry run
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama-3.2-1B": (
        "llama",
        {
            **{"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32},
            **{"num_key_value_heads": 8, "head_dim": 64},
        },
    ),
    "Qwen3-0.6B": (
        "qwen3",
        {
            **{"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
            **{"num_key_value_heads": 8, "head_dim": 128},
        },
    ),
    "bge-m3": (
        "xlm-roberta",
        {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16},
    ),
}
METHODS = {
    "llama": ("clustered-tail", "i-clustered"),
    "qwen3": ("clustered-tail",),
    "xlm-roberta": ("clustered-tail", "i-clustered", "clustered", "performer"),
}
LENGTHS = 32768, 65536, 8192, 16384
ROUNDS = 3
PROFILED, KERNELS = 16384, 14  # tokens, and how many kernels of a call are listed
PROFILED_METHODS = "clustered-tail", "i-clustered", "lsh", "local", "performer"


def main() -> None:
    # argparse, because this script also runs on bare machines, which do not have Typer.
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="Folder for the results.")
    parser.add_argument("--minutes", type=float, default=9.0, help="Time limit of the whole run.")
    parser.add_argument("--parts", nargs="+", choices=SHARES, default=list(SHARES))
    parser.add_argument("--dry-run", action="store_true", help="Tiny sizes, in Triton's interpreter, on the CPU.")
    parser.add_argument("--part", choices=SHARES, help=argparse.SUPPRESS)  # in the process of a part
    options = parser.parse_args()
    if options.part:
        PART[options.part](options)
        return
    if not options.dry_run and not torch.cuda.is_available():
        parser.error("there is no GPU here; --dry-run runs everything at tiny sizes on the CPU")
    options.out.mkdir(parents=True, exist_ok=True)
    shares = sum(SHARES[part] for part in options.parts) or 1.0
    for part in options.parts:
        run(part, max(LEAST_SECONDS, 60 * options.minutes * SHARES[part] / shares), options)


def run(part: str, seconds: float, options: argparse.Namespace) -> None:
    """Run one part in a process of its own, which is interrupted after these seconds and killed soon after."""
    command = [sys.executable, __file__, "--part", part, "--out", str(options.out), "--minutes", str(seconds / 60)]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "TRITON_INTERPRET": str(int(options.dry_run))}
    began = time.monotonic()
    print(f"== {part}, {seconds:.0f} s", flush=True)
    process = subprocess.Popen(
        command + ["--dry-run"] * options.dry_run, env=environment, cwd=ROOT, start_new_session=True
    )
    for wait, next_signal in ((seconds + 40, signal.SIGINT), (15, signal.SIGKILL)):
        try:
            process.wait(wait)
            break
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, next_signal)
    print(f"== {part}: exit {process.wait()} after {time.monotonic() - began:.0f} s", flush=True)


def environment(options: argparse.Namespace) -> None:
    """Versions, hardware and backends."""
    import subquad as sq
    from subquad.tools.runs import machine

    store(
        options.out / "environment.json",
        {
            "python": sys.version.split()[0],
            "versions": machine.versions(),
            "hardware": machine.hardware("cpu" if options.dry_run else "cuda"),
            "backends": sq.backends(),
        },
    )


def correctness(options: argparse.Namespace) -> None:
    """The tests of the kernels, then those of all methods; the summary of failures is at the end of each file."""
    end = time.monotonic() + 60 * options.minutes
    workers = [] if options.dry_run else ["-n", str(min(WORKERS, os.cpu_count() or 1))]
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    for name, chosen in TESTS.items():
        kind, chosen = ("interpreted", FEW) if options.dry_run else ("cuda", chosen)
        command = [sys.executable, "-m", "tests.library.triton", kind, "--tb=short", *workers, *chosen]
        path = options.out / f"{name}.txt"
        with path.open("wb") as log:
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
            try:
                process.wait(max(10.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                interrupt(process)
        print("\n".join(path.read_text("utf-8", "replace").splitlines()[-40:]), flush=True)
        if options.dry_run:
            return


def interrupt(process: "subprocess.Popen[bytes]") -> None:
    """Interrupt pytest, which then prints the summary of what it has run."""
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
    for child in children:
        os.kill(int(child), signal.SIGINT)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()


def headline(options: argparse.Namespace) -> None:
    """The sheet of `subquad bench --gpu-sheet`, stored after each load."""
    from subquad.tools.bench.gpu_page import markdown
    from subquad.tools.bench.gpu_sheet import Sheet, SheetPlan, fill, measure
    from subquad.tools.report.report_files import finite

    def keep(sheet: Sheet) -> None:
        plain = finite(sheet.plain())
        store(options.out / "gpu-sheet.json", plain)
        command = f"python3 benchmarks/on_gpu.py --minutes {options.minutes:.1f} --parts headline"
        (options.out / "gpu-sheet.md").write_text(markdown(plain, command), "utf-8")

    def tell(message: str, done: int, total: int) -> None:
        print(f"{done}/{total} {message}", flush=True)

    if options.dry_run:
        tiny = SheetPlan(("clustered",), ("linear",), (32,), (16,), 1, "float32", "cpu", minutes=options.minutes)
        fill(Sheet(tiny, "no GPU", "interpreter"), WallClock(), tell, store=keep)
    else:
        measure(SheetPlan(minutes=options.minutes), tell, keep)


class WallClock:
    """Stands in for the timer of a GPU in a dry run: one call, no graph, no kernels."""

    def eager(self, call: Callable[[], Any]) -> float:
        began = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - began)

    def graph(self, call: Callable[[], Any]) -> float:
        raise RuntimeError("a dry run captures no graph")

    def peak_mib(self, call: Callable[[], Any]) -> float:
        return 0.0

    def kernels(self, call: Callable[[], Any]) -> dict[str, float]:
        return {}


def models(options: argparse.Namespace) -> None:
    """The forward pass of whole models with random weights in bf16, by SDPA and by swapped methods, at each length."""
    import subquad.hf

    end, rows = time.monotonic() + 60 * options.minutes, []
    lengths = (48,) if options.dry_run else LENGTHS
    for length in lengths:
        for name, (kind, sizes) in SHAPES.items():
            if time.monotonic() > end - 5:
                rows.append({"model": name, "tokens": length, "reason": "no time was left"})
                continue
            try:
                model = built(kind, sizes, max(lengths), options.dry_run)
                rows += rows_of(name, kind, model, length, subquad.hf, options.dry_run)
            except Exception as error:  # a row says so, and the next model runs
                rows.append({"model": name, "tokens": length, "reason": " ".join(str(error).split())[:300]})
            model = None
            store_models(options.out, rows)


def built(kind: str, sizes: dict[str, Any], longest: int, tiny: bool) -> Any:
    """A model of these sizes with random weights, without its head."""
    from transformers import AutoConfig, AutoModel

    if tiny:
        sizes = sizes | {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        sizes |= {"head_dim": 16, "num_key_value_heads": 1} if "head_dim" in sizes else {}
    config = AutoConfig.for_model(kind, **sizes, vocab_size=1000, max_position_embeddings=longest + 8)
    torch.manual_seed(0)
    device = "cpu" if tiny else "cuda"
    with torch.device(device):
        model = AutoModel.from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16)
    return model.to(device).eval()


def rows_of(name: str, kind: str, model: Any, length: int, hf: Any, tiny: bool) -> list[dict[str, Any]]:
    """SDPA and each method in this model at this length."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(5, 1000, (1, length), generator=generator).to(model.device)
    extra = {} if kind == "xlm-roberta" else {"use_cache": False}

    def forward() -> torch.Tensor:
        with torch.inference_mode():
            out: torch.Tensor = model(tokens, **extra).last_hidden_state
        return out

    rows = []
    exact, base = None, None
    for method in (None, *METHODS[kind]):
        row: dict[str, Any] = {"model": name, "tokens": length, "method": method or "SDPA"}
        try:
            if method is not None:
                hf.swap(model, method)
            out = forward().float()
            milliseconds = median_ms(forward, tiny)
            row["ms"] = milliseconds
            if method is None:
                exact, base = out, milliseconds
            if exact is not None:  # without SDPA's output there is nothing to compare with
                row |= {"speedup": base / milliseconds, "cosine": cosine(out, exact)}
        except Exception as error:
            row["reason"] = " ".join(str(error).split())[:300]
        finally:
            if method is not None and hf.describe(model).methods:
                hf.restore(model)
        rows.append(row)
        print(row, flush=True)
    return rows


def cosine(out: torch.Tensor, exact: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(out, exact, dim=-1).mean())


def median_ms(call: Callable[[], Any], tiny: bool) -> float:
    """The median time of a few calls, to the end of the GPU's work."""
    times = []
    for _ in range(ROUNDS):
        if not tiny:
            torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        if not tiny:
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - began))
    return sorted(times)[ROUNDS // 2]


def profile(options: argparse.Namespace) -> None:
    """The kernels of a forward pass by the time that they take, torch's own included."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as recording

    from subquad.tools.bench.calls import Calls
    from subquad.tools.bench.gpu_sheet import SheetPlan

    plan = SheetPlan(device="cpu", heads=1, dtype="float32") if options.dry_run else SheetPlan()
    length = 32 if options.dry_run else PROFILED
    activity = ProfilerActivity.CPU if options.dry_run else ProfilerActivity.CUDA
    parts = []
    for method, causal in (*((name, False) for name in PROFILED_METHODS), ("clustered-tail", True)):
        call = Calls(plan.load(length, 64, "forward", causal)).call_of(method)
        heading = f"## {'causal ' * causal}{method}, {length:,} tokens"
        try:
            call()
            with recording(activities=[activity]) as trace:
                for _ in range(ROUNDS):
                    call()
                if not options.dry_run:
                    torch.cuda.synchronize()
        except Exception as error:
            parts += [heading, " ".join(str(error).split())[:300]]
            continue
        events = sorted(trace.key_averages(), key=lambda event: -event.self_device_time_total)[:KERNELS]
        rows = [
            [event.key[:70], f"{event.self_device_time_total / 1e3 / ROUNDS:.3f}", str(event.count // ROUNDS)]
            for event in events
        ]
        parts += [heading, table(("kernel", "ms per call", "launches"), rows)]
        (options.out / "profile.md").write_text("\n\n".join(parts) + "\n", "utf-8")


def store_models(out: Path, rows: list[dict[str, Any]]) -> None:
    """Write the rows so far, as data and as a table."""
    store(out / "models.json", rows)
    head = ("model", "tokens", "method", "ms", "over SDPA", "cosine to SDPA", "reason")
    forms = {"ms": ".1f", "speedup": ".2f", "cosine": ".4f"}
    body = [
        [
            *(row["model"], f"{row['tokens']:,}", row.get("method", "")),
            *(f"{row[key]:{form}}" if key in row else "" for key, form in forms.items()),
            row.get("reason", ""),
        ]
        for row in rows
    ]
    (out / "models.md").write_text(table(head, body) + "\n", "utf-8")


def store(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=1), "utf-8")


PART = {
    "environment": environment,
    "correctness": correctness,
    "headline": headline,
    "models": models,
    "profile": profile,
}

if __name__ == "__main__":
    main()
