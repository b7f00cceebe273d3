"""`subquad compare`: attention methods in a model, by quality, speed and memory."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from subquad.core.errors import InputError, as_input_error
from subquad.core.messages import note
from subquad.methods import Full, Method, parse_method
from subquad.methods.full import EXACT
from subquad.tools.calibrate.fitted import calibrated
from subquad.tools.calibrate.settings import LEARNED
from subquad.tools.compare.comparison import Comparison
from subquad.tools.compare.labelled_tasks import LabelledTask, load_task
from subquad.tools.compare.settings import (
    AUTO,
    COMPARED,
    COMPARED_16_BITS,
    COMPARED_16_BITS_CAUSAL,
    COMPARED_CAUSAL,
    LONG_BLOCKS,
    CompareSettings,
)
from subquad.tools.data.texts import read_documents, report_folders, standard_library
from subquad.tools.measure.deadline import Deadline
from subquad.tools.measure.group import ALONE, MeasuringGroup
from subquad.tools.models.compare_rows import (
    NOT_CALIBRATED,
    CompareRow,
    check_names,
    row_of,
    row_of_adapter,
    row_of_plan,
)
from subquad.tools.models.dtypes import FP32, has_products, has_tiles
from subquad.tools.models.generation import check_new_tokens
from subquad.tools.models.other_attention import row_of_attention
from subquad.tools.models.passages import read
from subquad.tools.models.pretrained import MAIN_LENGTH, Pretrained, check_model, load
from subquad.tools.models.split_methods import check_not_fitted, split
from subquad.tools.runs import machine
from subquad.tools.runs.floor import Floor
from subquad.tools.runs.jobs import Progress, silent

REFRESHED_AFTER = 30.0  # seconds


def measure(
    settings: CompareSettings,
    out: Path,
    progress: Progress = silent,
    group: MeasuringGroup = ALONE,
    refresh: Callable[[Comparison], None] = lambda comparison: None,
) -> Comparison:
    """Measure everything and return the comparison with its results. Finished units are kept under `out`.

    A group splits the tokens of every input over its processes. `refresh` is called with the comparison as soon as the
    model was run at a length, and every half minute from then on, as long as there is more to measure.

    Raises:
        InputError: something in the settings does not work; the message has the remedy.
    """
    average = machine.load_average()
    progress("loading", 0, 1)
    comparison = prepare(settings, out, progress, group)
    with as_input_error():
        comparison.check_finite()
    comparison.load_average = average
    until_refresh, lengths = Deadline(REFRESHED_AFTER), 0

    def after(key: str) -> None:
        nonlocal until_refresh, lengths
        is_new = len(comparison.lengths_done) > lengths
        if is_new or (lengths and until_refresh.left < 0):
            until_refresh, lengths = Deadline(REFRESHED_AFTER), len(comparison.lengths_done)
            if not comparison.is_finished:
                refresh(comparison)

    comparison.finish(out, progress, group=group, after=after)
    comparison.ended = True
    return comparison


def check(settings: CompareSettings) -> None:
    """Raise InputError for what is wrong in the settings, as far as it shows before the model is loaded."""
    _parse_inputs(settings)
    check_model(settings.model, settings.device)


def _parse_inputs(settings: CompareSettings) -> tuple[list[Method], list[str] | None, LabelledTask | None]:
    """The methods, exact attention first, the documents and the labelled task that the settings name."""
    if not (settings.methods or settings.adapters or settings.plans or settings.attention):
        raise InputError("no methods to compare: --methods names none")
    names = settings.methods
    if settings.calibrate and names == COMPARED:
        names += LEARNED
    with as_input_error():
        methods = list(dict.fromkeys([Full(), *map(parse_method, names)]))
    documents = read_documents(settings.text, settings.column) if settings.text else None
    task = load_task(settings.task, settings.data_dir, settings.examples) if settings.task else None
    return methods, documents, task


def prepare(
    settings: CompareSettings,
    out: Path = Path("subquad-compare"),
    progress: Progress = silent,
    group: MeasuringGroup = ALONE,
) -> Comparison:
    """Check all that the user gave, cheapest first, load the model, and calibrate where that is asked for."""
    methods, documents, task = _parse_inputs(settings)
    check_not_fitted(settings.calibrate, group)
    report_folders(progress, settings.text)
    pretrained = load(settings.model, settings.device, group, FP32)
    asked = settings
    if settings.extend is not None and settings.lengths is None:
        settings = replace(settings, lengths=(_main_length(settings, pretrained), settings.extend))
    pretrained = pretrained.extended_to(settings.extend, settings.named_lengths)
    if pretrained.is_causal_lm and settings.methods == COMPARED:
        learned = [method for method in methods if str(method) in LEARNED]
        methods = [Full(), *map(parse_method, COMPARED_CAUSAL), *learned]
    if task is not None and pretrained.kind != "embedding":
        raise InputError(f"--task {task.name} needs an embedding model; {pretrained.name} is a {pretrained.kind}")
    length = _main_length(settings, pretrained)
    check_new_tokens(pretrained, settings.new_tokens, [length, *settings.named_lengths])
    floor = Floor.for_model(settings, pretrained.kind)
    saved = [row_of_adapter(pretrained, folder) for folder in settings.adapters]
    saved += [row_of_plan(pretrained, folder) for folder in settings.plans]
    made, _ = calibrated(settings.calibrate, settings.text, settings.column, methods, pretrained, length, out, progress)
    rows = [made.get(method) or row_of(pretrained, method) for method in methods] + saved
    check_names((row.name, row.plan or row.adapter) for row in rows)
    rows = [split(row.up_to_longest(length), pretrained) for row in rows]
    for line in _unfitted(rows):
        note(progress, line)
    reading = read(pretrained, documents or standard_library(), length, settings.passages, settings.seed)
    for name in dict.fromkeys(settings.attention):
        rows.append(row_of_attention(pretrained, name, reading.passages[0]))
    rows = _in_dtypes(settings, rows, pretrained.is_causal_lm)
    comparison = Comparison(
        settings=settings,
        asked=asked,
        pretrained=pretrained,
        reading=reading,
        rows=[row for row in rows if row.layers],
        refused=[row for row in rows if not row.layers],
        task=task,
        length=length,
        floor=floor,
    )
    _check_batches(comparison)
    if settings.methods == COMPARED and comparison.is_long(comparison.lengths[-1]):
        comparison.rows += _with_long_blocks(settings, pretrained)
    return comparison


def _check_batches(c: Comparison) -> None:
    """InputError where the text makes no batch at the main length, or at another one that is named."""
    if c.settings.batch > 1:
        c.reading.batches(c.pretrained, c.length, 1, c.settings.batch, c.settings.seed)
    if c.asked.lengths is not None and c.beyond_texts:
        raise InputError(f"--lengths {','.join(map(str, c.beyond_texts))}: {c.why_beyond_texts}; give shorter lengths")


def _in_dtypes(settings: CompareSettings, rows: Sequence[CompareRow], causal: bool) -> list[CompareRow]:
    """The rows in the dtypes that are asked for. Exact attention in fp32, which all are compared with, comes first.

    Under "auto", those in fp32, and in bf16 if the processor has products in bf16: by default those of the methods that
    can come close, and all that the user names.
    """
    dtype = settings.dtype
    if dtype == AUTO:
        if not has_products(settings.device, "bf16"):
            return list(rows)
        usual = {EXACT, *(COMPARED_16_BITS_CAUSAL if causal else COMPARED_16_BITS)}
        is_usual = settings.methods == COMPARED
        twice = [row for row in rows if row.layers and (row.is_named or not is_usual or row.name in usual)]
        return [*rows, *(row.in_dtype("bf16") for row in twice)]
    if dtype == FP32:
        return list(rows)
    return [*(row for row in rows if row.is_exact), *(row.in_dtype(dtype) for row in rows)]


def _with_long_blocks(settings: CompareSettings, pretrained: Pretrained) -> list[CompareRow]:
    """The row with longer exact blocks, which are both closer and faster where tiles of bf16 are multiplied."""
    if settings.dtype not in (AUTO, "bf16") or not has_tiles(settings.device, "bf16"):
        return []
    row = split(row_of(pretrained, parse_method(LONG_BLOCKS)), pretrained)
    return [row.in_dtype("bf16")] if row.layers else []


def _main_length(settings: CompareSettings, pretrained: Pretrained) -> int:
    """Tokens of the inputs on which quality is measured; what is longer is run with extended positions."""
    longest, usual = settings.max_length, MAIN_LENGTH[pretrained.kind]
    if settings.lengths:
        shortest = min(settings.lengths)
        return shortest if pretrained.limit is None else min(shortest, pretrained.limit)
    if longest is not None and pretrained.limit is not None:
        longest = min(longest, pretrained.limit)
    if longest is not None:
        longest = min(longest, usual)
    return pretrained.length(longest, "max-length", usual)


def _unfitted(rows: Sequence[CompareRow]) -> Iterator[str]:
    """Lines about the rows whose learned parameters are those that they start with."""
    unfitted = [row for row in rows if row.layers and row.note == NOT_CALIBRATED]
    can = [row.name for row in unfitted if row.method.traits.fit is not None]
    cannot = [row.name for row in unfitted if row.method.traits.fit is None]
    start = "warning: not fitted, so measured with the parameters that they start with"
    if can:
        yield (
            f"{start}: {', '.join(can)}; --calibrate TEXT fits them first, as does `subquad calibrate`, whose folder "
            "--adapter takes"
        )
    if cannot:
        yield f"{start}: {', '.join(cannot)}; only training fits them"
