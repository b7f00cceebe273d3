"""`subquad plan`, and `sq.plan` on a transformers model: from what the user gives to a plan with its record."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from subquad import hf
from subquad.core.errors import InputError, as_input_error
from subquad.hf.adapters import describe_model
from subquad.hf.plans import Plan, load_plan
from subquad.hf.swapping import swapped_out
from subquad.methods import BoundMethod, Full, Method, resolve
from subquad.tools.measure.deadline import Deadline
from subquad.tools.measure.group import ALONE, MeasuringGroup
from subquad.tools.measure.metrics import Judge, Metric, Score
from subquad.tools.measure.module_calls import device_of
from subquad.tools.models.compare_rows import mark_of
from subquad.tools.models.dtypes import TORCH
from subquad.tools.models.longer import short_note
from subquad.tools.models.pretrained import Pretrained, check_model, load
from subquad.tools.models.saved_card import Measured
from subquad.tools.models.saving import Chosen
from subquad.tools.plan.arguments import (
    as_inputs,
    check_settings,
    check_together,
    check_unlearned,
    judge_for,
    mark_of_function,
    mark_of_inputs,
)
from subquad.tools.plan.loads import PlanInputs, input_loads
from subquad.tools.plan.measure import Candidate
from subquad.tools.plan.planning import Planning, candidates_for, plan_of
from subquad.tools.plan.prepared import loss_elsewhere, of_text, parse_inputs, prepare
from subquad.tools.plan.settings import PlanSettings
from subquad.tools.plan.short import short_fidelities
from subquad.tools.plan.workers import UNAIDED, Workers
from subquad.tools.runs import machine
from subquad.tools.runs.alone import alone_in
from subquad.tools.runs.cache import JobCache, run_cache
from subquad.tools.runs.executors import LOCAL, Executor
from subquad.tools.runs.floor import Floor
from subquad.tools.runs.jobs import Progress
from subquad.tools.runs.options import as_command
from subquad.tools.runs.records import to_plain

OUTSIDE, MOST_OUTSIDE = 0.15, 15.0  # share of the limit, and at most seconds, for starting and for the report
ELSEWHERE = {  # settings that are not in the fingerprint of a run by themselves
    *("model", "text", "column", "lengths", "extend", "device", "dtype"),  # but as model, inputs and machine
    *("methods", "adapters", "calibrate"),  # but as candidates
    "minutes",  # but in the names of units that the clock decided
}
REPORT = "report.json"  # of a command
JOBS_VERSION = 5  # changes with what the units hold, so that a run of another version is not resumed


@dataclass(frozen=True)
class Made:
    """A plan, and all that it was chosen from."""

    plan: Plan
    planning: Planning
    metadata: dict[str, Any]  # metadata of the model, for the report
    cache: JobCache  # of the results of its jobs
    notes: tuple[str, ...] = ()  # sentences on the weights, and on methods that were not tried


def make(
    settings: PlanSettings, out: Path, progress: Progress, executor: Executor = LOCAL, group: MeasuringGroup = ALONE
) -> Made:
    """Plan for a text model. Finished units are kept under `out`; losses of single layers are measured by `executor`.

    A group splits the tokens of every input over its processes.

    Raises:
        InputError: something in the settings does not work; the message has the remedy.
    """
    seconds = 60 * settings.minutes
    deadline = Deadline(seconds, group, outside=min(OUTSIDE * seconds, MOST_OUTSIDE))
    prepared = prepare(settings, out, progress, group, deadline)
    elsewhere = partial(loss_elsewhere, settings, out.absolute()) if executor.description else None
    workers = Workers(executor, elsewhere)
    made = plan_loads(
        prepared.loads,
        settings,
        prepared.methods,
        prepared.fitted,
        out,
        progress,
        prepared.metadata,
        as_command("plan", settings, group.count),
        workers,
        deadline,
    )
    progress("short texts", 0, 1)
    original = prepared.pretrained
    if settings.dtype is not None:
        original = load(settings.model, settings.device, group).extended_to(settings.extend)
    short = short_fidelities(original, prepared.loads, made.plan, made.planning.floor)
    extended = {} if settings.extend is None else {"extended_to": settings.extend}
    plan = replace(made.plan, made_on={**made.plan.made_on, "short_texts": short, **extended})
    return replace(made, plan=plan, notes=(*prepared.notes, *made.notes, *workers.note))


def check(settings: PlanSettings) -> None:
    """Raise InputError for what is wrong in the settings, as far as it shows before the model is loaded."""
    parse_inputs(settings)
    check_model(settings.model, settings.device)


def plan_by_length(
    model: Any,
    inputs: Iterable[Any],
    settings: PlanSettings,
    *,
    methods: str | Method | Sequence[str | Method] | None,
    metric: str | Metric | None,
    score: Score | None,
    out: str | Path | None,
    progress: Progress,
) -> Plan:
    """Plan for a transformers model, as `sq.plan` describes."""
    inner = hf.transformers_model(model)  # TypeError if it is not a model
    check_settings(settings)
    settings = replace(settings, device=str(device_of(inner)))
    methods = [methods] if isinstance(methods, str | Method) else methods
    tried = None if methods is None else [resolve(method) for method in methods]
    check_unlearned(tried or [])
    inputs = as_inputs(inputs)
    assert settings.min_fidelity is not None
    judge = judge_for(inputs, metric, score, settings.min_fidelity)
    are_texts = bool(inputs) and all(isinstance(item, str) for item in inputs)
    if not are_texts and settings.lengths is not None:
        raise InputError(
            f"lengths={settings.model_lengths} are of passages that texts are cut into, but the inputs are not texts: "
            "they are planned at the lengths that they have"
        )
    if inner.training:
        raise InputError("the model is in training mode, where dropout makes outputs random: call model.eval() first")
    deadline = Deadline(60 * settings.minutes)
    with ExitStack() as stack:
        folder = Path(out if out is not None else stack.enter_context(TemporaryDirectory()))
        if (report := folder / REPORT).exists():
            raise InputError(f"out={str(out)!r} contains the report of a command ({report.name}); give another folder")
        stack.enter_context(alone_in(folder))
        stack.enter_context(swapped_out(model))
        if are_texts:
            pretrained = of_sentence_transformer(model)
            _check_reach(pretrained, settings.named_lengths)
            loads, metadata = of_text(pretrained, inputs, settings)
        else:
            loads, metadata = _of_inputs(model, inputs, judge)
        made = plan_loads(loads, settings, tried, {}, folder, progress, metadata, "sq.plan", deadline=deadline)
        if out is not None:
            made.plan.save(folder, model)
            made.cache.forget()
    return made.plan


def _check_reach(pretrained: Pretrained, lengths: Sequence[int]) -> None:
    """InputError for a length past rotary positions: the plan would be of a model that the user does not have."""
    longest, rows = max(lengths, default=0), hf.rotary_limit(pretrained.model)
    if rows is not None and longest > rows:
        raise InputError(
            f"lengths: {longest} is past the {rows:,} positions of the model; sq.hf.extend_positions(model, {longest}) "
            f"extends them by YaRN, without training, or give at most {rows}"
        )


def chosen_by_plan(settings: PlanSettings, out: Path) -> Chosen | None:
    """The methods of the plan in a folder, and the longest length at which it is not exact attention, or None.

    Raises:
        InputError: what is in the folder is not a plan for the model.
    """
    with as_input_error():
        plan = load_plan(out)
        lengths = [int(length) for length, verified in plan.verified.items() if "exact_because" not in verified]
        if not lengths:
            return None
        made, dtype = plan.made_on, str(plan.model["dtype"]).removeprefix("torch.")
        lines = [
            f"{n:,} tokens: {plan.description(n)}, on {entry['passages']} "
            f"{'batches' if entry.get('batches') else 'passages'}."
            for n in lengths
            if (entry := plan.verified[str(n)])
        ]
        short = made.get("short_texts")
        measured = Measured(lines, made["command"], made["hardware"], dtype, short_note(short) if short else "")
        methods = plan.by_layer(load(settings.model, settings.device).model)
        weights = None if settings.dtype is None else TORCH[settings.dtype]
        return Chosen("the plan", methods, lengths, measured, weights, plan.recorded)


def _of_inputs(model: Any, inputs: Sequence[Any], judge: Judge | None) -> tuple[list[PlanInputs], dict[str, Any]]:
    """The loads of the user's own inputs, and what tells them and how they are judged from others."""
    loads, described = input_loads(model, inputs, judge), describe_model(model)
    text = {"inputs": len(inputs), "fingerprint": mark_of_inputs(inputs)}
    mark = None if judge is None else mark_of_function(judge.function)
    judged = [mark, judge is not None and judge.is_score]
    metadata = {"model": described, "text": text, "identity": described, "judged": judged}
    return loads, metadata


def of_sentence_transformer(model: Any) -> Pretrained:
    """Wrap the model, tokenizer and pooling of a SentenceTransformer, to read texts with it.

    Raises:
        TypeError: it is not one, so texts cannot be read.
    """
    inner, tokenizer = hf.transformers_model(model), getattr(model, "tokenizer", None)
    if tokenizer is None:
        raise TypeError(
            f"texts as inputs need a SentenceTransformer, which has a tokenizer; {type(model).__name__} has none: give "
            "mappings of the model's keywords to tensors"
        )
    modes = [getattr(part, "pooling_mode", None) for part in model.modules()]
    first = any(mode in ("cls", ("cls",)) for mode in modes) or any(
        getattr(part, "pooling_mode_cls_token", False) for part in model.modules()
    )
    limit = hf.position_limit(inner) or getattr(inner.config, "max_position_embeddings", None)
    return Pretrained(type(model).__name__, inner, tokenizer, "embedding", "cls" if first else "mean", limit)


def plan_loads(
    loads: Sequence[PlanInputs],
    settings: PlanSettings,
    methods: Sequence[Method] | None,
    fitted: Mapping[str, dict[int, BoundMethod]],
    out: Path,
    progress: Progress,
    metadata: dict[str, Any],
    command: str,
    workers: Workers = UNAIDED,
    deadline: Deadline | None = None,
) -> Made:
    """Plan for the inputs of some loads. `methods` are tried, and also `fitted` parameters by name and layer.

    The deadline is by default that of the settings, from now on.

    Raises:
        InputError: a method cannot be tried, or the time does not suffice to decide anything.
    """
    group = loads[0].group
    deadline = deadline or Deadline(60 * settings.minutes, group)
    with as_input_error():
        if methods is not None:
            _check_methods(methods, loads[0].model, also=fitted)
        candidates = candidates_for(loads[0].model, methods, fitted, group)
        check_together({load.length: candidates(load.length) for load in loads})
        cache = run_cache(out, fingerprint(loads, candidates, settings, metadata), group)
        floor = Floor.for_model(settings, metadata["model"].get("kind", ""))
        planning = Planning(loads, candidates, floor, deadline, settings.shift, workers)
        planning.run(cache, progress)
    made_on = {
        "command": command,
        "versions": machine.versions(),
        "hardware": machine.hardware(settings.device),
        "text": metadata["text"],
        "resumed": cache.resumed,
        **({"ranks": group.count} if group.count > 1 else {}),
    }
    return Made(plan_of(planning, made_on), planning, metadata["model"], cache)


def _check_methods(methods: Sequence[Method], model: Any, also: Mapping[str, Any]) -> None:
    """InputError where a method has learned parameters that nothing fits, or no layer can run any of the methods.

    `also` are candidates that are fitted.
    """
    if not also and all(method == Full() for method in methods):
        raise InputError("the methods name none but exact attention, so there is nothing to plan with")
    for method in methods:
        if method.traits.learned:
            remedy = "" if method.traits.fit is None else ": --calibrate TEXT fits them, or give an --adapter"
            raise InputError(f"{method} has learned parameters, and a plan accepts only those that are fitted{remedy}")
    refused = {method: hf.refusals(model, method) for method in methods if method != Full()}
    if refused and not also and all(len(reasons) == len(hf.find_layers(model)) for reasons in refused.values()):
        method, reasons = next(iter(refused.items()))
        raise InputError(f"no layer of the model can run {method}: {reasons[min(reasons)]}")


def fingerprint(
    loads: Sequence[PlanInputs],
    candidates: Callable[[int], list[Candidate]],
    settings: PlanSettings,
    metadata: dict[str, Any],
) -> dict[str, Any]:
    """All that the units depend on."""
    return {
        "identity": metadata["identity"],
        "text": metadata["text"],
        "judged": metadata.get("judged"),
        "loads": [[load.length, len(load.items), len(load.held_out)] for load in loads],
        "candidates": {
            str(load.length): [[c.name, mark_of(c.bounds)] for c in candidates(load.length)] for load in loads
        },
        "settings": {name: value for name, value in vars(settings).items() if name not in ELSEWHERE},
        "machine": [machine.versions(), machine.hardware(settings.device)],
        "units": JOBS_VERSION,
        **({"ranks": loads[0].group.count} if loads[0].group.count > 1 else {}),
        **({"batches": to_plain([load.batches for load in loads])} if loads[0].batches is not None else {}),
    }
