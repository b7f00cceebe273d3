"""Check audits: coverage of their bounds, overhead at 4,096 tokens, and drift from prose to Python source.

    python benchmarks/audit.py [--data FOLDER] [--audits 1000] [--passages 300] [--out FILE.md]

FOLDER holds gutenberg/; the default is the environment variable SUBQUAD_DATA. The encoder of the demo extra runs
clustered-tail. Python source is the standard library of the Python that runs this.
"""

import copy
import math
import random
import statistics
import sysconfig
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import sheet
import speeches
import torch
from torch import Tensor

import subquad as sq
from subquad.audits.statistics import Betting, usual
from subquad.audits.watch import LEVELS, beyond
from subquad.methods import Full, Method
from subquad.methods.core.method import Call, Partial, Traits
from subquad.tools.models.pretrained import Pretrained, load

METHOD = "clustered-tail"
HEADS, TOKENS, WIDTH = 4, 128, 8  # of the attention whose errors are known
ROWS, BASELINE, WITHIN, STREAMS = 32, 100, 200, 400  # rows of a call; audited calls; simulated streams


@dataclass(frozen=True)
class Known(Method):
    """Exact attention whose row i of head h is off by the factor 1 + errors[h, i]: its relative error is known."""

    name: ClassVar[str] = "known"
    traits: ClassVar[Traits] = Full.traits
    errors: ClassVar[list[Tensor]] = []  # of each call, one after the other and from the start again
    calls: ClassVar[list[int]] = [0]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Partial:
        errors = self.errors[self.calls[0] % len(self.errors)]
        self.calls[0] += 1
        return Full().attend(query, key, value, call)[0] * (1 + errors[..., None]), None


def populations() -> dict[str, list[Tensor]]:
    """Errors of all rows of one call, or of several different calls."""
    generator = torch.Generator().manual_seed(0)
    uniform = torch.rand(HEADS, TOKENS, generator=generator)
    rare = torch.where(torch.rand(HEADS, TOKENS, generator=generator) < 0.01, 0.9, 0.01)
    heavy = (0.02 / (uniform + 1e-4).sqrt()).clamp(max=1.0)
    one_head = torch.full((HEADS, TOKENS), 0.02)
    one_head[0] = 0.4
    return {
        "uniform in [0, 0.2]": [0.2 * uniform],
        "1 % of 0.9, else 0.01": [rare],
        "heavy tail, at most 1": [heavy],
        "one head of four 0.4, else 0.02": [one_head],
        "every second call ten times worse": [0.02 * uniform, 0.2 * uniform],
    }


def coverage(audits: int, calls: int = 10, tolerance: float = 0.1) -> str:
    rows = []
    q, k, v = torch.randn(3, 1, HEADS, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    for name, errors in populations().items():
        Known.errors[:] = errors
        every = torch.stack(errors)
        truth = {
            "share": float((every > tolerance).double().mean()),
            "mean_square": float(every.double().square().mean()),
        }
        held, bounds = Counter[str](), {"share": [], "mean_square": []}
        for seed in range(audits):
            layer, Known.calls[0] = Known().bind(heads=HEADS, head_dim=WIDTH), 0
            with (
                sq.audit(layer, tolerance=tolerance, every=1, allowed=0.999, seed=seed) as audit,
                torch.inference_mode(),
            ):
                for _ in range(calls):
                    layer(q, k, v)
            found = audit.report().overall
            for what, true in truth.items():
                bound = getattr(found, f"{what}_bound")
                held[what] += bound >= true
                bounds[what].append(bound)
        cells = [name]
        for what, true in truth.items():
            cells += [f"{true:.4f}", f"{statistics.median(bounds[what]):.4f}", f"{100 * held[what] / audits:.1f} %"]
        rows.append(cells)
    head = ["errors", "share above 0.1", "median bound", "held", "mean e²", "median bound", "held"]
    return sheet.table(head, rows)


def overhead(data: Path, length: int = 4096, passes: int = 3) -> str:
    """The overhead of one audited call, and of auditing with every=100."""
    read = speeches.passages(data, length, 1)
    sq.hf.swap(read.model.model, METHOD)
    ratios: dict[str, list[float]] = {}
    with sq.audit(read.model.model, tolerance=1.0, every=1, allowed=0.999, rows=ROWS) as audit:
        for _ in range(passes):
            read.model.forward(read.items)
    report = audit.report()
    for layer in report.layers:
        ratios[layer.name] = [layer.overhead]
    worst, mean = max(each[0] for each in ratios.values()), report.overall.overhead
    seconds = sum(watch.tally.layer_seconds for watch in audit._watches.values()) / report.overall.audited
    counting = counted()
    return (
        f"At {length:,} tokens an audit of {ROWS} rows takes {100 * mean:.2f} % of the time of the call that it "
        f"audits ({100 * worst:.2f} % in the layer where it is most; {report.overall.audited} calls of "
        f"{1e3 * seconds:.0f} ms).\n"
        f"With every=100 that is {mean / 100:.3%} of the layers' time, and counting the other calls "
        f"({1e6 * counting:.1f} µs each) {counting / seconds:.4%} more."
    )


def counted(calls: int = 20000) -> float:
    """Seconds that a call which is not audited takes longer, of a layer that does nothing."""

    class Nothing:
        def run(self, *_: object) -> None: ...

    x = torch.zeros(1)
    bound = Full().bind(heads=1, head_dim=1)
    with sq.audit(bound, tolerance=1.0, every=10**9) as audit:
        watch, nothing = next(iter(audit._watches.values())), Nothing()
        start = time.process_time()
        for _ in range(calls):
            watch(nothing, x, x, x, None)
        return (time.process_time() - start) / calls


# ---------------------------------------------------------------------- drift


def texts(data: Path) -> dict[str, str]:
    books = sorted((data / "gutenberg").glob("*.txt"))
    modules = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    random.Random(0).shuffle(modules)
    source = "\n".join(module.read_text("utf-8", "replace") for module in modules[:80])
    return {book.name[: book.name.index("_")]: book.read_text("utf-8", "replace") for book in books} | {
        "Python": source
    }


def errors_of(model: Pretrained, text: str, passages: int, length: int = 512) -> list[list[tuple[float, ...]]]:
    """The errors of each layer in the rows of each passage; passages in a random order."""
    ids, content = model.content_ids(text), length - len(model.wrap([], length))
    items = [model.wrap(ids[at : at + content], length) for at in range(0, len(ids) - content, content)]
    random.Random(0).shuffle(items)
    found: dict[int, list[tuple[float, ...]]] = {}
    take: Callable[[object], None] = lambda call: found.setdefault(call.number, []).append(call.errors)  # noqa: E731
    with sq.audit(model.model, tolerance=1.0, every=1, allowed=0.999, rows=ROWS, callback=take):
        for item in items[:passages]:
            model.embed([item])
    return [found[number] for number in sorted(found)]


def alarms(base: list[list[tuple[float, ...]]], read: list[list[tuple[float, ...]]], same: bool) -> list[int | None]:
    """The number of audited calls of a layer until the first alarm, for each simulated stream with an alarm."""
    chance, when = random.Random(0), []
    for _ in range(STREAMS):
        order = chance.sample(range(len(base[0])), len(base[0]))
        first, rest = order[:BASELINE], order[BASELINE:]
        later = rest if same else chance.sample(range(len(read[0])), len(read[0]))
        found = []
        for of_base, of_read in zip(base, read, strict=True):
            counts = {level: Counter(beyond(of_base[at], level) for at in first) for level in LEVELS}
            usually = usual(counts, ROWS, 0.05 / len(base))
            test = Betting(usually["low"], usually["high"])
            for at, which in enumerate(later[:WITHIN]):
                test.add(beyond(of_read[which], usually["error"]) / ROWS)
                if test.peak >= len(base) / 0.05:
                    found.append(at + 1)
                    break
        when.append(min(found, default=None))
    return when


def drift(data: Path, passages: int) -> str:
    model = load(None)
    model = model.with_model(copy.deepcopy(model.model))
    sq.hf.swap(model.model, METHOD)
    errors = {name: errors_of(model, text, passages) for name, text in texts(data).items()}
    base, rows = next(iter(errors)), []
    for name, found in errors.items():
        when = alarms(errors[base], found, name == base)
        caught = [each for each in when if each is not None]
        median = statistics.median(caught) if len(caught) > len(when) / 2 else math.inf
        of_rows = [error for layer in found for call in layer for error in call]
        rows.append(
            [
                f"{base}, other passages" if name == base else name,
                f"{statistics.median(of_rows):.3f}",
                f"{100 * len(caught) / len(when):.1f} %",
                sheet.MISSING if math.isinf(median) else f"{median:.0f}",
                f"{max(caught)}" if len(caught) == len(when) else sheet.MISSING,
            ]
        )
    head = ["text that is read", "median e", f"alarms within {WITHIN} audited calls", "median of the first", "latest"]
    return sheet.table(head, rows)


def main(
    lengths: tuple[int, ...] = (4096,),
    data: Path = sheet.DATA,
    audits: int = 1000,
    passages: int = 300,
    out: Path | None = None,
) -> None:
    parts = [
        "## Coverage",
        f"{audits:,} audits of 10 calls with 32 rows each, at confidence 0.95, for errors that are known.",
        coverage(audits),
        "## Overhead",
        "\n".join(overhead(data, length) for length in lengths),
        "## Drift",
        f"The encoder reads passages of 512 tokens with {METHOD}. The baseline is {BASELINE} passages of the first "
        f"text; {STREAMS} streams of other passages, drawn without replacement from {passages} of each text, are "
        "tested at false_alarm=0.05 and confidence 0.95. Audited calls are those of each layer.",
        drift(data, passages),
    ]
    sheet.publish("Audits", parts, out)


if __name__ == "__main__":
    sheet.run(main)
