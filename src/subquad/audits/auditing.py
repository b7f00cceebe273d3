"""`audit`: exact rows for a few sampled queries while a model serves."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from torch import nn

from subquad.audits.argument_checks import check_allowed, check_floor, check_share, check_tolerance, check_whole
from subquad.audits.embeddings import POOLINGS, EmbeddingWatch
from subquad.audits.outputs import TOKENS
from subquad.audits.prompt_watch import NextTokenFloor, PromptWatch, causal_lm_in
from subquad.audits.recorded import DEFAULTS, record_audit
from subquad.audits.report import AuditReport, summary
from subquad.audits.statistics import Betting, usual
from subquad.audits.watch import AuditedCall, AuditRules, LayerWatch
from subquad.core.forward_hooks import run_first
from subquad.core.spelling import nearest
from subquad.methods import BoundMethod

logger = logging.getLogger("subquad.audit")

ON_EXCEED = ("warn", "raise", "exact")


class Exceeded(RuntimeError):
    """Raised when an audited call has more rows above the tolerance than allowed; `call` is its record."""

    def __init__(self, message: str, call: AuditedCall):
        super().__init__(message)
        self.call = call


class Audit:
    """An audit of one model: `start` and `stop` it, or use it as a context manager; `report` at any time."""

    def __init__(
        self,
        model: Any,
        layers: Mapping[str, tuple[BoundMethod, bool]],
        rules: dict[str, Any],
        *,
        confidence: float,
        baseline: Mapping[str, Any] | None,
        false_alarm: float,
        seed: int,
        callback: Callable[[AuditedCall], None] | None,
        prompts: PromptWatch | None = None,
        embeddings: EmbeddingWatch | None = None,
        settings: Mapping[str, Any],
    ):
        self._settings = settings
        self._prompts, self._embeddings = prompts, embeddings
        self._model, self._bound = model, {name: bound for name, (bound, _) in layers.items()}
        self._confidence, self._callback = confidence, callback
        self._rules = AuditRules(**rules, report=self._tell, exceeded=self._error)
        self._watches = {
            name: LayerWatch(number, name, str(bound.method), self._rules, seed + number, of_same_tokens)
            for number, (name, (bound, of_same_tokens)) in enumerate(layers.items())
        }
        self._alarm_at = len(layers) / false_alarm  # each layer has its share of the false alarms
        if baseline is not None:
            for name, watch in self._watches.items():
                usual = baseline["layers"][name]
                watch.drift, watch.usual_error = Betting(usual["low"], usual["high"]), usual["error"]
        self._alarmed: set[str] = set()

    def start(self) -> Audit:
        """Start the audit.

        Raises:
            ValueError: a layer of the model is audited already, or other methods were swapped in since the audit was
                made; nothing is started then.
        """
        now = layers_of(self._model)
        if any(bound is not now.get(name, (None,))[0] for name, bound in self._bound.items()):
            raise ValueError("other methods were swapped in since this audit was made; make a new one with sq.audit")
        for name, bound in self._bound.items():
            if bound.watch is not None:
                raise ValueError(f"layer {name} is audited already; stop that audit first: one model has one audit")
        for name, bound in self._bound.items():
            bound.watch = self._watches[name]
        for watch in (self._prompts, self._embeddings):
            if watch is not None:
                watch.start()
        return self

    def stop(self) -> None:
        """Stop the audit and restore the model; the report stays."""
        for watch in (self._prompts, self._embeddings):
            if watch is not None:
                watch.stop()
        for name, bound in self._bound.items():
            if bound.watch is self._watches[name]:
                del bound.watch

    def __enter__(self) -> Audit:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def report(self) -> AuditReport:
        """The results so far. Each bound is valid for one evaluation; the test of drift is valid at any time."""
        delta, layers = 1 - self._confidence, []
        tallies = {name: watch.counted() for name, watch in self._watches.items()}
        for name, watch in self._watches.items():
            evidence = None if watch.drift is None else watch.drift.peak
            drifted = None if evidence is None else evidence >= self._alarm_at
            layers.append(summary(name, watch.method, [tallies[name]], delta, evidence, drifted))
        peaks = [layer.evidence for layer in layers if layer.evidence is not None]
        methods = {layer.method for layer in layers}
        overall = summary(
            "all",
            methods.pop() if len(methods) == 1 else f"{len(methods)} methods",
            list(tallies.values()),
            delta,
            max(peaks) if peaks else None,
            any(layer.drifted for layer in layers) if peaks else None,
        )
        next_tokens = None if self._prompts is None else self._prompts.report(delta)
        embeddings = None if self._embeddings is None else self._embeddings.report(delta)
        tolerance = self._rules.tolerance if math.isfinite(self._rules.tolerance) else None
        return AuditReport(tuple(layers), overall, tolerance, self._confidence, next_tokens, embeddings)

    def baseline(self) -> dict[str, Any]:
        """The baseline for drift tests of later audits, as plain data, which can be written as JSON.

        For each layer a usual error, which about half of the rows exceed, and an interval for the expected share of an
        audited call's rows that do. All intervals hold together at the audit's confidence, for calls that are
        independent and have one distribution; widen them to accept more drift.

        Raises:
            ValueError: a layer has no audited call.
        """
        delta, layers = (1 - self._confidence) / len(self._watches), {}
        for name, watch in self._watches.items():
            tally = watch.counted()
            if not tally.audited:
                raise ValueError(
                    f"layer {name} has no audited call among {tally.calls}, so it has no baseline; run more "
                    f"calls, or audit with a smaller `every` than {self._rules.every}"
                )
            layers[name] = usual(tally.beyond, self._rules.rows, delta)
        return {"confidence": self._confidence, "layers": layers}

    def record(self) -> None:
        """Record the arguments of this audit in the model's config, so that they are saved and loaded with the model.

        `sq.audit(model)` then starts with them, also of a loaded model; arguments that are given replace them. `seed`
        and `callback` are not recorded.

        Raises:
            ValueError: the model is not a swapped transformers model, whose config has a record.
        """
        record_audit(self._model, self._settings)

    def _tell(self, audited: AuditedCall) -> None:
        """Log what matters in an audited call, and hand it to the callback."""
        undefined = sum(error != error for error in audited.errors)
        if undefined:
            logger.warning(
                "layer %s: %d of %d audited rows have an exact result that is not finite",
                *(audited.name, undefined, len(audited.errors)),
            )
        if audited.exceeded and self._rules.on_exceed != "raise":
            logger.warning("%s%s", self._why(audited), "; computed again exactly" if audited.replaced else "")
        if audited.evidence is not None and audited.evidence >= self._alarm_at and audited.name not in self._alarmed:
            self._alarmed.add(audited.name)
            logger.warning(
                "layer %s has drifted: its errors are not those of the baseline (evidence %.3g, alarm at %.3g); look "
                "at what the model reads now",
                *(audited.name, audited.evidence, self._alarm_at),
            )
        if self._callback is not None:
            self._callback(audited)

    def _why(self, audited: AuditedCall) -> str:
        if not math.isfinite(self._rules.tolerance):
            return f"layer {audited.name}: {audited.above} of {len(audited.errors)} audited rows are not finite"
        finite = [error for error in audited.errors if error == error]
        return (
            f"layer {audited.name}: {audited.above} of {len(audited.errors)} audited rows have a relative error above "
            f"tolerance={self._rules.tolerance:g} (largest {max(finite, default=math.nan):.3g}), more than "
            f"allowed={self._rules.allowed:g} of them"
        )

    def _error(self, audited: AuditedCall) -> Exception:
        return Exceeded(f"{self._why(audited)}; use a closer method there, or on_exceed='exact'", audited)


def audit(
    model: Any,
    *,
    tolerance: float | None = None,
    rows: int | None = None,
    every: int | None = None,
    allowed: float | None = None,
    on_exceed: str | None = None,
    confidence: float | None = None,
    baseline: Mapping[str, Any] | None = None,
    false_alarm: float | None = None,
    max_kl: float | None = None,
    min_agreement: float | None = None,
    min_fidelity: float | None = None,
    pooling: str = "mean",
    positions: int | None = None,
    seed: int = 0,
    callback: Callable[[AuditedCall], None] | None = None,
) -> Audit:
    """Compare a few sampled rows of attention, and some outputs, with exact ones while a model runs.

        e_i = ‖out_i − exact_i‖ / ‖exact_i‖          exact_i = softmax(scale · q_i Kᵀ + bias_i) V

    In each layer one call of every `every` is audited, at a random place among them. Its rows are drawn uniformly from
    all heads and real queries, with replacement; exact rows see all keys that the call's mask lets them see, and cost
    O(rows·M·D). Other calls are only counted: nothing is computed on the device, and nothing waits for it.

    A model into which a plan was swapped has its output audited too, in the units of the plan's floor, which needs no
    other argument: one input of every `every` is read twice more, with its methods and with exact attention. Embeddings
    are compared by their cosine; next-token distributions of a causal language model, whether it has a plan or not, at
    sampled positions and at the last one.

    Arguments that are not given are those that `Audit.record` recorded with the model, or else the defaults below.

    Args:
        model: a swapped transformers model, a wrapper around one, or any module with `sq.nn.MultiheadAttention` or
            bound methods in it.
        tolerance: the e_i that is accepted. Default: any finite one, for a model with a floor of its output. An error
            of rows is not one of the output: layers of a plan that keeps a fidelity of 0.99 have rows with e_i > 0.5.
        rows: how many rows of an audited call are compared. Default: 32.
        every: calls of a layer of which one is audited. Default: 100.
        allowed: the share of an audited call's rows that may be above the tolerance. Default: 0.
        on_exceed: what happens to an audited call with more: "warn" (the default) logs it, "raise" raises `Exceeded`,
            "exact" logs it and returns exact attention in its place.
        confidence: 1 − δ, of each bound in the report. Default: 0.95.
        baseline: what `Audit.baseline` returned of an earlier audit; drift from it is then tested in each layer.
        false_alarm: how likely any layer is to report drift, ever, while the expected share of each audited call's rows
            above the usual error, given all earlier ones, stays in the baseline's interval; and, apart from that, how
            likely an alarm of the output is, ever, while each input's expected loss keeps the floor. Default: 0.05.
        max_kl: in a causal language model, the mean KL(exact ‖ method) in nats beyond which there is an alarm. Default:
            the floor of the plan that was swapped in, or whose baseline is given; otherwise there is no alarm.
        min_agreement: in its place, the least share of positions with the exact top token.
        min_fidelity: in a model that gives hidden states, the mean cosine of the embeddings to the exact ones below
            which there is an alarm. Default: the floor of the plan that was swapped in, or whose baseline is given.
        pooling: how hidden states become an embedding: "mean", over real tokens, or "cls", the first one; for
            `min_fidelity`, because a plan has its own.
        positions: how many positions of an audited prompt are compared, in addition to the last. Default: 32.
        seed: of the sampling. No global generator is read or moved.
        callback: called with an `AuditedCall` after each audited call.

    Returns:
        An `Audit`: a context manager, or `start()` and `stop()` it; `report()` at any time.

    Raises:
        ValueError: nothing in the model is swapped; an argument is out of its range; neither a tolerance, nor a floor,
            nor a baseline; a baseline of another model; a floor of an output that the model does not have; on `start`,
            a layer that another audit watches.
        TypeError: `model` is not a module and does not contain one.

    Not audited, and counted as skipped: calls with dropout, without a real query, and inside transforms of torch.func.
    Steps on a state of fixed size (`step`, `StateCache`) have no keys to compare with, and are not counted. Exact rows
    that are not finite have no error: they are counted, logged, and taken as above the tolerance. Under `torch.compile`
    audited layers run uncompiled (a graph break, so `fullgraph=True` raises); the first calls after `start` and `stop`
    compile the rest again. With a floor of embeddings, the whole encoder runs uncompiled.

    Source: for the bounds Clopper and Pearson 1934, Maurer and Pontil 2009, Waudby-Smith and Ramdas 2024.

    >>> import torch, subquad as sq
    >>> layer = sq.nn.MultiheadAttention(64, 4, method="clustered-tail:clusters=8,topk=8").eval()
    >>> with sq.audit(layer, tolerance=0.5, every=2) as audit, torch.inference_mode():
    ...     for _ in range(4):
    ...         out = layer(torch.randn(1, 200, 64))
    >>> audit.report().overall.audited
    2
    """
    check_floor(max_kl, min_agreement, min_fidelity)
    if pooling not in POOLINGS:
        raise ValueError(f"pooling={pooling!r}, but it must be {' or '.join(map(repr, POOLINGS))}")
    layers = layers_of(model)
    module = model if isinstance(model, nn.Module) else model.model
    record = _record_of(module)
    settings: dict[str, Any] = {**DEFAULTS, **(record.get("audit") or {})}
    arguments = tolerance, rows, every, allowed, on_exceed, confidence, false_alarm, positions, baseline
    settings |= {name: value for name, value in zip(DEFAULTS, arguments, strict=True) if value is not None}
    tolerance, rows, every, allowed, on_exceed, confidence, false_alarm, positions, baseline = (
        settings[name] for name in DEFAULTS
    )
    check_whole(rows=rows, every=every, positions=positions)
    if tolerance is not None:
        check_tolerance(tolerance)
    check_allowed(allowed)
    if on_exceed not in ON_EXCEED:
        raise ValueError(f"on_exceed={on_exceed!r}, but it must be {', '.join(map(repr, ON_EXCEED))}")
    check_share(confidence=confidence, false_alarm=false_alarm)
    if callback is not None and not callable(callback):
        raise TypeError(f"callback={callback!r}, but it must be a function of an AuditedCall")
    if baseline is not None:
        _check_baseline(baseline, layers)
    chosen = {"max_kl": max_kl, "min_agreement": min_agreement, "min_fidelity": min_fidelity}
    floor: dict[str, Any] = {name: value for name, value in chosen.items() if value is not None}
    if floor:
        floor |= {"pooling": pooling} if min_fidelity is not None else {}
    else:
        floor = (baseline or {}).get("floor") or dict(record.get("floor") or {})
    if tolerance is None and not floor and baseline is None:
        raise ValueError(
            f"nothing would raise an alarm: no plan with a floor was swapped into this {type(module).__name__}; give a "
            "tolerance of rows, a floor (min_fidelity, max_kl or min_agreement) or a baseline"
        )
    watched = {"every": every, "false_alarm": false_alarm, "seed": seed}
    return Audit(
        model,
        layers,
        {
            "rows": rows,
            "every": every,
            "tolerance": math.inf if tolerance is None else tolerance,
            "allowed": allowed,
            "on_exceed": on_exceed,
        },
        confidence=confidence,
        baseline=baseline,
        false_alarm=false_alarm,
        seed=seed,
        callback=callback,
        prompts=_prompt_watch(module, floor, {**watched, "positions": positions}),
        embeddings=_embedding_watch(module, floor, watched),
        settings={**settings, "floor": floor},
    )


def _record_of(module: nn.Module) -> Mapping[str, Any]:
    """The record of a swap in the config of a model or a part of it that has a floor or an audit; empty without one."""
    for part in module.modules():
        record = getattr(getattr(part, "config", None), "subquad", None)
        if isinstance(record, Mapping) and (record.get("floor") or record.get("audit")):
            return record
    return {}


def _prompt_watch(module: nn.Module, floor: Mapping[str, Any], options: dict[str, Any]) -> PromptWatch | None:
    """The watch of a causal language model's prompts; None of other models."""
    max_kl, min_agreement = floor.get("max_kl"), floor.get("min_agreement")
    check_floor(max_kl, min_agreement)
    bounds = None if max_kl is None and min_agreement is None else NextTokenFloor(max_kl, min_agreement)
    decoder = causal_lm_in(module)
    if decoder is not None:
        return PromptWatch(decoder, floor=bounds, **options)
    if bounds is not None:
        raise ValueError(
            f"{bounds} is a floor of next tokens, but {type(module).__name__} is not a causal language model; leave "
            "out max_kl and min_agreement"
        )
    return None


def _embedding_watch(module: nn.Module, floor: Mapping[str, Any], options: dict[str, Any]) -> EmbeddingWatch | None:
    """The watch of a model's embeddings; None without a floor of them."""
    min_fidelity = floor.get("min_fidelity")
    check_floor(None, None, min_fidelity)
    if min_fidelity is None:
        return None
    encoder: Any = next((p for p in module.modules() if hasattr(p, "base_model") and hasattr(p, "config")), None)
    why = None
    if encoder is None:
        why = "is not a transformers model; leave out min_fidelity"
    elif causal_lm_in(module) is not None:
        why = "is a causal language model; leave out min_fidelity"
    else:
        encoder = encoder.base_model
        names = inspect.signature(encoder.forward).parameters
        if not any(name in names for name in TOKENS):
            why = f"reads {encoder.main_input_name}, not tokens; leave out min_fidelity, and give a tolerance of rows"
        elif "decoder_input_ids" in names:
            why = "is an encoder-decoder; audit its encoder: sq.audit(model.get_encoder(), …)"
    if why is not None:
        raise ValueError(f"fidelity ≥ {min_fidelity:g} is a floor of embeddings, but {type(module).__name__} {why}")
    return EmbeddingWatch(encoder, min_fidelity=min_fidelity, pooling=floor.get("pooling", "mean"), **options)


def layers_of(model: Any) -> dict[str, tuple[BoundMethod, bool]]:
    """The bound methods of a model by layer name, and whether padded keys are also padded queries there.

    A swapped layer has the name that it has in its transformers model, whatever its wrapper. A method that was asked
    for by name is swapped in first.

    Raises:
        TypeError: not a module, and not a wrapper with one as its `model`.
        ValueError: there is no bound method in it.
    """
    module = model if isinstance(model, nn.Module) else getattr(model, "model", None)  # a pipeline
    if not isinstance(module, nn.Module):
        raise TypeError(f"expected a swapped model or a module with subquad layers, got {type(model).__name__}")
    for part in list(module.modules()):
        run_first(part)
    layers = {}
    for name, part in module.named_modules():
        if isinstance(part, BoundMethod):
            above = module.get_submodule(name.rpartition(".")[0])
            swapped = all(hasattr(above, mark) for mark in ("label", "cross"))  # `hf.layers.Attached`, not imported
            name = name.removesuffix(".bound") if swapped else name.removesuffix("attention")
            name = name.removesuffix(".subquad")
            inner = str(above.label).partition(" (")[2].removesuffix(")") if swapped else name
            name = name if inner in layers else inner
            layers[name.rstrip(".") or type(module).__name__] = (part, swapped and not above.cross)
    if not layers:
        raise ValueError(
            f"nothing in this {type(module).__name__} runs a subquad method, so there is nothing to audit; "
            "swap a method in first: sq.hf.swap(model, method) or sq.nn.swap(module, method)"
        )
    return layers


def _check_baseline(baseline: Mapping[str, Any], layers: Mapping[str, Any]) -> None:
    """Raise ValueError where a baseline is damaged, or is one of another model."""
    try:
        usual = {
            name: tuple(float(layer[key]) for key in ("error", "low", "high"))
            for name, layer in baseline["layers"].items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"the baseline is damaged ({type(error).__name__}: {error}); give what `baseline()` of an audit returned"
        ) from None
    for name in layers:
        if name not in usual:
            raise ValueError(
                f"the baseline has no layer {name!r}; it has {len(usual)} layers and the model has {len(layers)}"
                f"{nearest(name, usual)}"
            )
        size, low, high = usual[name]
        if not (0 <= low <= high <= 1 and size > 0):
            raise ValueError(
                f"the baseline of layer {name!r} is {low:g} to {high:g} above {size:g}, but shares lie in [0, 1] and "
                "errors above 0"
            )
