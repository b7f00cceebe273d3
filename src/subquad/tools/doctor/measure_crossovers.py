"""Measure from how many tokens on methods are faster than the fastest exact attention on this machine.

Exact attention is SDPA or subquad's kernel, whichever is faster at a length. Lengths grow until every method is clearly
faster, so that a run takes less than a minute on most machines.
"""

import statistics
from typing import Any

import torch

from subquad.core.errors import InputError, as_input_error
from subquad.core.messages import note
from subquad.core.spelling import instead
from subquad.methods import parse_method
from subquad.methods.core.measured_crossovers import MeasuredCrossover
from subquad.methods.core.measured_crossovers import machine as local_machine
from subquad.methods.full import EXACT, FAST_EXACT
from subquad.tools.bench.calls import Calls, Load
from subquad.tools.bench.crossovers import crossing
from subquad.tools.bench.settings import BenchSettings
from subquad.tools.bench.size_checks import check_sizes
from subquad.tools.doctor.settings import MASKS, CrossoverSettings
from subquad.tools.measure.noise import TIE, noise_of, verdict
from subquad.tools.measure.timing import Effort, ratios, until_steady
from subquad.tools.runs import machine
from subquad.tools.runs.jobs import Progress, silent

EFFORT = Effort(seconds=0.2, least=3, enough=6, most=30, precision=0.02)
CLEAR = 1.1  # the speed-up at two lengths in a row after which longer ones are not measured
SHORT = 0.01  # seconds of a call up to which both exact kernels are timed, whichever is slower
DROPPED = 1.5  # how many times slower than the other one an exact kernel may be beyond


def measure(settings: CrossoverSettings, progress: Progress = silent) -> list[MeasuredCrossover]:
    """Measure the crossovers of each method in each dtype, under each mask that the method supports.

    Raises:
        InputError: something in the settings does not work; the message has the remedy.
    """
    _check(settings)
    with as_input_error():
        methods = list(dict.fromkeys(map(parse_method, settings.methods)))
    dtypes, masks = dict.fromkeys(settings.dtypes), dict.fromkeys(settings.masks)
    panels = [(dtype, mask == "causal") for dtype in dtypes for mask in masks]
    measured: list[MeasuredCrossover] = []
    average = machine.load_average()
    used = machine.watch()
    with as_input_error():
        for number, (dtype, causal) in enumerate(panels):
            able = [str(method) for method in methods if not causal or method.traits.causal != "no"]
            measured += _panel(settings, able, dtype, causal, _from(progress, number, len(panels)))
    if not measured:
        raise InputError("nothing to measure: none of these methods supports a causal mask; add none to --masks")
    noise = noise_of(machine.load(average, [used()]), [])
    if noise.busy:
        note(progress, noise.says)
    return measured


def _check(s: CrossoverSettings) -> None:
    """Raise InputError for settings that do not work."""
    sizes: dict[str, Any] = {"lengths": s.lengths, "heads": s.heads, "head_dim": s.head_dim}
    check_sizes(BenchSettings(methods=s.methods, dtypes=s.dtypes, device=s.device, **sizes))
    if not s.masks:
        raise InputError(f"nothing to measure: no mask is named; there are {', '.join(MASKS)}")
    for mask in s.masks:
        if mask not in MASKS:
            raise InputError(f"no mask {mask!r}{instead(mask, MASKS, '')}")


def _from(progress: Progress, number: int, count: int) -> Progress:
    """The progress of one panel among several."""
    return lambda what, done, total: progress(what, number * total + done, count * total)


def _panel(
    s: CrossoverSettings, methods: list[str], dtype: str, causal: bool, progress: Progress
) -> list[MeasuredCrossover]:
    """The crossovers of methods in one dtype, with a causal mask or without one."""
    timed, exact, lengths = methods, [EXACT, FAST_EXACT], sorted(set(s.lengths))
    speedups: dict[str, dict[int, float]] = {name: {} for name in methods}
    ties: dict[str, list[int]] = {name: [] for name in methods}
    for done, length in enumerate(lengths):
        if not timed:
            break
        progress(f"{dtype}{', causal' * causal}: {length:,} tokens", done, len(lengths))
        calls = Calls(Load(length, dtype, "forward", 1, s.heads, s.head_dim, s.device, seed=0, causal=causal))
        seconds = until_steady({name: calls.call_of(name) for name in (*exact, *timed)}, EFFORT, torch.device(s.device))
        medians = {name: statistics.median(seconds[name]) for name in exact}
        fastest = min(exact, key=lambda name: medians[name])
        for name in timed:
            samples = ratios(seconds[name], seconds[fastest])
            speedups[name][length] = statistics.median(samples)
            if verdict(speedups[name][length], samples, TIE) == "within the noise":
                ties[name].append(length)
        exact = [name for name in exact if medians[name] <= max(DROPPED * medians[fastest], SHORT)]
        timed = [name for name in timed if not _is_clear(speedups[name], ties[name])]
    progress("done", len(lengths), len(lengths))
    common: dict[str, Any] = {"machine": local_machine(s.device), "dtype": dtype, "causal": causal}
    common |= {"heads": s.heads, "head_dim": s.head_dim}
    crossings = {name: crossing(speedups[name], ties[name]) for name in methods}
    stored = ("state", "tokens", "shortest", "longest")
    return [
        MeasuredCrossover(method=name, **common, **{key: result[key] for key in stored})
        for name, result in crossings.items()
    ]


def _is_clear(speedups: dict[int, float], ties: list[int]) -> bool:
    """True if a method was clearly faster at the last two lengths."""
    last = sorted(speedups)[-2:]
    return len(last) == 2 and all(length not in ties and speedups[length] >= CLEAR for length in last)
