"""`subquad calibrate`: fit a method's learned parameters to a frozen model, from plain text.

Each step reads a passage with the model as it is; every attention layer's queries, keys and values come out of that one
pass, and every layer takes a step on its own `fit_loss`. Layers do not see each other, so each keeps the parameters
with which it did best on the held-out passages. What has been done is on disk after every measurement, so that a run
that was cut off goes on and ends with the same parameters.
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from subquad import hf
from subquad.core import checksums as seals
from subquad.core.errors import InputError, NothingToLearn, as_input_error
from subquad.methods import BoundMethod, Fit, Full, LearnedHash, Method, parse_method
from subquad.tools.calibrate.adapter_card import adapter_card
from subquad.tools.calibrate.settings import CalibrateSettings
from subquad.tools.data.texts import read_documents, report_folders
from subquad.tools.measure.capture import LayerInputs, recorded
from subquad.tools.measure.dynamics import hash_dynamics
from subquad.tools.measure.exact_limits import exact_up_to
from subquad.tools.measure.fidelity import relative_error
from subquad.tools.measure.hooks import ChoosesKeys, at_n_b
from subquad.tools.measure.timing import stopwatch
from subquad.tools.measure.utility import attention_utility
from subquad.tools.models.compare_rows import longest
from subquad.tools.models.pieces import Pieces, cut
from subquad.tools.models.pretrained import Pretrained, check_model, load
from subquad.tools.runs.cache import run_cache
from subquad.tools.runs.jobs import Progress, silent

EVERY = 50  # steps between measurements on the held-out passages
PATIENCE = 4  # measurements without a better mean, after which it ends
SHOWN = 10  # steps over which the loss that the progress shows is a mean
GAIN = 1e-3  # the least relative change that counts as better


@dataclass
class Fitted:
    """The parameters that did best, layer by layer, and how they came about."""

    pretrained: Pretrained
    bounds: dict[int, BoundMethod]
    record: dict[str, Any]
    refused: dict[int, str] = field(default_factory=dict)

    @property
    def method(self) -> Method:
        """The method that was fitted."""
        return next(iter(self.bounds.values())).method


def calibrate(settings: CalibrateSettings, out: Path, progress: Progress = silent) -> Fitted:
    """Fit, and keep what is done under `out` until `clear(out)`.

    Raises:
        InputError: something in the settings does not work; the message has the remedy.
    """
    progress("loading", 0, 1)
    method, documents = _parse_inputs(settings)
    report_folders(progress, settings.text)
    pretrained = load(settings.model, settings.device)
    return fit(settings, method, pretrained, documents, out, progress)


def check(settings: CalibrateSettings) -> None:
    """Raise InputError for what is wrong in the settings, as far as it shows before the model is loaded."""
    _parse_inputs(settings)
    check_model(settings.model, settings.device)


def _parse_inputs(settings: CalibrateSettings) -> tuple[Method, list[str]]:
    """The method and the documents that the settings name."""
    if not settings.text:
        raise InputError("no text to fit on: give --text FILE or FOLDER")
    with as_input_error():
        method = parse_method(settings.method)
    if method.traits.fit is None:
        raise InputError(f"{method.name!r} has nothing to calibrate: {_why_not(method)}")
    return method, read_documents(settings.text, settings.column)


def fit(
    settings: CalibrateSettings,
    method: Method,
    pretrained: Pretrained,
    documents: list[str],
    out: Path,
    progress: Progress,
) -> Fitted:
    """`calibrate` with the model and the text at hand."""
    recipe = method.traits.fit
    assert recipe is not None
    steps = recipe.steps if settings.steps is None else settings.steps
    for name, number in (("steps", steps), ("batch", settings.batch), ("held-out passages", settings.held_out)):
        if number < 1:
            raise InputError(f"{name} {number} is too few: give 1 or more")
    length = pretrained.length(settings.max_length, "max-length")
    pieces = cut(documents, length, settings.held_out, settings.seed)
    if settings.batch > len(pieces.train):
        raise InputError(f"batch {settings.batch} is more than the {len(pieces.train)} passages of the text")
    layers = hf.find_layers(pretrained.model)
    with as_input_error():
        refused = hf.refusals(pretrained.model, method)
        able = [layer for layer in layers if layer.number not in refused]
        if not able:
            raise InputError(f"no layer of {pretrained.name} can run {method}: {refused[min(refused)]}")
        bounds = {layer.number: hf.bind(layer, method, pretrained.limit).to(pretrained.device) for layer in able}
    trainer = Trainer(pretrained, pieces, mark_of_documents(documents), bounds, recipe, steps, length, settings)
    fingerprint = {
        "settings": {k: str(v) for k, v in asdict(settings).items() if k not in ("text", "steps")},
        "steps": steps,
        "method": str(method),
        "model": hf.weights_mark(pretrained.model),
        "text": [len(pieces.train), pieces.held_out, sum(map(len, documents))],
    }
    with as_input_error():
        trainer.run(run_cache(out, fingerprint).folder / "checkpoint.pt", progress)
    trainer.take_best()
    record = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "method": method.to_dict(),
        "model": pretrained.name,
        "notes": list(pretrained.notes),
        "text": {
            "source": [str(path) for path in settings.text],
            "documents": len(documents),
            "fingerprint": mark_of_documents(documents),
        },
        "passages": {"train": len(pieces.train), "held_out": len(pieces.held_out), "tokens": length},
        "settings": {"steps": steps, "batch": settings.batch, "seed": settings.seed, **asdict(recipe)},
        "metric": trainer.metric,
        "seconds": round(trainer.seconds, 1),
        "ended": trainer.ended,
        "history": trainer.history,
        "best": {str(number): best["at"] for number, best in trainer.best.items()},
        "layers": {str(layer.number): layer.name for layer in able},
    }
    if (most := longest(bounds)) is not None:
        record["longest"] = most
    if refused:
        record["refused"] = {str(number): reason for number, reason in refused.items()}
    return Fitted(pretrained, bounds, record, refused)


def mark_of_documents(documents: Sequence[str]) -> str:
    """A mark of a text in 16 hexadecimal digits."""
    digest = sha256()
    for document in documents:
        digest.update(sha256(document.encode()).digest())
    return digest.hexdigest()[:16]


class Trainer:
    """The steps, the measurements between them, and the state that a checkpoint holds."""

    def __init__(
        self,
        pretrained: Pretrained,
        pieces: Pieces,
        text: str,
        bounds: dict[int, BoundMethod],
        recipe: Fit,
        steps: int,
        length: int,
        settings: CalibrateSettings,
    ):
        self.pretrained, self.pieces, self.text, self.bounds, self.recipe = pretrained, pieces, text, bounds, recipe
        self.steps, self.length, self.settings = steps, length, settings
        parameters = [p for bound in bounds.values() for p in bound.parameters()]
        self.optimizer = torch.optim.Adam(parameters, lr=recipe.learning_rate)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, _half_cosine(steps))
        self.step = 0
        self.recent: list[float] = []  # losses of the last steps, for the progress alone
        self.loss = math.nan  # the mean of ten such losses
        self.stale = 0  # measurements since the mean was last better
        self.ended = ""
        self.seconds = 0.0
        self.history: list[dict[str, Any]] = []
        self.best: dict[int, dict[str, Any]] = {}
        # A method without declared keys has no utility; its outputs have an error.
        chooses_keys = all(isinstance(bound.method, ChoosesKeys) for bound in bounds.values())
        self.metric = recipe.metric if chooses_keys else "error"

    def run(self, checkpoint: Path, progress: Progress) -> None:
        """Step until the last step, or until nothing has become better for a while."""
        self._restore(checkpoint)
        if not self.history:
            self._measure(checkpoint, losses={})
        self._refuse_the_exact()  # of a checkpoint too: the measurement is saved before it is refused
        losses: dict[int, list[float]] = {}
        while not self.ended:
            progress(self._line(), self.step, self.steps)
            seconds, losses_of_step = stopwatch(self._step)
            for number, loss in losses_of_step.items():
                losses.setdefault(number, []).append(loss)
            self._note_loss(sum(losses_of_step.values()) / len(losses_of_step))
            self.step += 1
            self.seconds += seconds
            if self.step % EVERY == 0 or self.step == self.steps:
                self._measure(checkpoint, {number: sum(some) / len(some) for number, some in losses.items()})
                losses = {}
        progress(self._line(), self.steps, self.steps)

    def _note_loss(self, loss: float) -> None:
        """Take note of a step's loss, the mean over the layers; what is shown is the mean of ten steps."""
        self.recent.append(loss)
        if len(self.recent) == SHOWN:
            self.loss, self.recent = sum(self.recent) / SHOWN, []

    def _refuse_the_exact(self) -> None:
        """NothingToLearn if the method is exact on these passages, by its settings or as measured."""
        layers = {layer.number: layer for layer in hf.find_layers(self.pretrained.model)}
        dtype = self.pretrained.model.dtype
        limits = (exact_up_to(bound.method, layers[n].causal, dtype) for n, bound in self.bounds.items())
        if min(limits) >= self.length or mean_at(self.history[0], "error") < 1e-6:
            method = next(iter(self.bounds.values())).method
            raise NothingToLearn(
                f"{method} is exact attention on passages of at most {self.length} tokens, so there is nothing to "
                "learn: calibrate on longer passages, or with fewer keys"
            )

    def _step(self) -> dict[int, float]:
        spans = self.pieces.order(self.step, self.settings.batch, self.settings.seed)
        losses: dict[int, list[float]] = {}  # a layer that runs several times in a pass has one of each
        self.optimizer.zero_grad()
        for call in self._calls([self.pieces.passage(self.pretrained, span, self.length) for span in spans]):
            bound = self.bounds[call.number]
            query, key, value, asked = bound.prepare(call.query, call.key, call.value, **call.options)
            loss = bound.method.fit_loss(query, key, value, asked)
            assert loss is not None, f"{bound.method.name!r} has a fit but no loss to fit by"
            if not torch.isfinite(loss):
                raise ValueError(f"the loss of layer {call.number} is {float(loss.detach())} at step {self.step}")
            torch.autograd.backward(loss)
            losses.setdefault(call.number, []).append(float(loss.detach()))
        self.optimizer.step()
        self.schedule.step()
        return {number: sum(some) / len(some) for number, some in losses.items()}

    def _calls(self, items: list[list[int]]) -> list[LayerInputs]:
        """The inputs of the layers that are fitted, as tensors that autograd takes."""
        with recorded(self.pretrained.model) as calls:
            self.pretrained.forward(items)
        chosen = [call for call in calls if call.number in self.bounds]
        return [replace(c, query=c.query.clone(), key=c.key.clone(), value=c.value.clone()) for c in chosen]

    def _measure(self, checkpoint: Path, losses: dict[int, float]) -> None:
        """Measure every layer on the held-out passages, remember its best parameters, see if it is time, and save."""
        self.seconds += stopwatch(partial(self._measure_layers, losses))[0]
        self._save(checkpoint)

    def _measure_layers(self, losses: dict[int, float]) -> None:
        by_layer: dict[int, list[dict[str, float]]] = {}  # of each of its calls
        for span in self.pieces.held_out:
            for call in self._calls([self.pieces.passage(self.pretrained, span, self.length)]):
                by_layer.setdefault(call.number, []).append(measure_layer(self.bounds[call.number], call))
        means = {
            number: {name: sum(metrics[name] for metrics in calls) / len(calls) for name in calls[0]}
            for number, calls in by_layer.items()
        }
        layers = {str(n): metrics | ({"loss": losses[n]} if n in losses else {}) for n, metrics in means.items()}
        self.history.append({"step": self.step, "layers": layers})
        before = self._mean_of_best() if self.best else None
        for number, metrics in means.items():
            if number not in self.best or self._better(metrics, self.best[number]["figures"]):
                state = copy.deepcopy(self.bounds[number].state_dict())
                self.best[number] = {"figures": metrics, "state": state, "at": self.step}
        if before is not None:
            self.stale = 0 if abs(self._mean_of_best() - before) > GAIN * abs(before) else self.stale + 1
        if self.step >= self.steps:
            self.ended = "all steps done"
        elif self.stale >= PATIENCE:
            self.ended = f"no better for {PATIENCE * EVERY} steps"

    def _better(self, new: dict[str, float], old: dict[str, float]) -> bool:
        metric = self.metric
        return new[metric] > old[metric] if metric == "utility" else new[metric] < old[metric]

    def _mean_of_best(self) -> float:
        return sum(best["figures"][self.metric] for best in self.best.values()) / len(self.best)

    def take_best(self) -> None:
        """Put each layer's best parameters into place."""
        for number, best in self.best.items():
            self.bounds[number].load_state_dict(best["state"])
            self.bounds[number].eval().requires_grad_(False)

    def _line(self) -> str:
        """The best so far on the held-out passages: the mean, and every layer's."""
        metric = self.metric
        layers = " ".join(f"{best['figures'][metric]:.2f}" for _, best in sorted(self.best.items()))
        now, before = self._mean_of_best(), mean_at(self.history[0], metric)
        line = f"{metric} at step {self.history[-1]['step']}: {now:.3f} (was {before:.3f}), by layer {layers}"
        return f"loss {self.loss:.4f}, {line}" if math.isfinite(self.loss) else line

    # ------------------------------------------------------------------ checkpoints

    def _save(self, checkpoint: Path) -> None:
        state = {name: getattr(self, name) for name in ("step", "stale", "ended", "seconds", "history", "best")}
        state["text"] = self.text
        state["bounds"] = {number: bound.state_dict() for number, bound in self.bounds.items()}
        state["optimizer"], state["schedule"] = self.optimizer.state_dict(), self.schedule.state_dict()
        seals.save(checkpoint, state)

    def _restore(self, checkpoint: Path) -> None:
        if not checkpoint.exists():
            return
        remedy = "remove this file to start the calibration from its beginning"
        state = seals.load(checkpoint, remedy, self.pretrained.device)
        if state.pop("text") != self.text:  # the text has changed
            return
        parameters = state.pop("bounds")
        for number, bound in self.bounds.items():
            bound.load_state_dict(parameters[number])
        self.optimizer.load_state_dict(state.pop("optimizer"))
        self.schedule.load_state_dict(state.pop("schedule"))
        for name, value in state.items():
            setattr(self, name, value)


def measure_layer(bound: BoundMethod, call: LayerInputs) -> dict[str, float]:
    """One layer on one passage: relative error of its outputs, utility with buckets of N/B, state of its hashes."""
    with torch.no_grad():
        metrics = {"error": relative_error(call.run(bound), call.run(Full()))}
        if not isinstance(bound.method, ChoosesKeys):
            return metrics
        options = {name: value for name, value in call.options.items() if name != "dropout_p"}
        measured = attention_utility(at_n_b(bound), call.query, call.key, **options)
        metrics |= {"utility": float(measured.utility.mean()), "keys": float(measured.keys.mean())}
        if isinstance(bound.method, LearnedHash):
            metrics |= asdict(hash_dynamics(bound, call.query, call.key, **options))
        return metrics


def save(fitted: Fitted, out: Path) -> Path:
    """Write the adapter with its card."""
    card = adapter_card(fitted.record, out.name)
    with as_input_error():
        hf.save_adapter(
            fitted.pretrained.model,
            out,
            bounds=fitted.bounds,
            record=fitted.record,
            card=card,
            max_length=fitted.pretrained.limit,
        )
    return out


def mean_at(entry: dict[str, Any], metric: str) -> float:
    """The mean over layers of a figure in an entry of the history."""
    layers = entry["layers"].values()
    return sum(metrics[metric] for metrics in layers) / len(layers)


def _half_cosine(steps: int) -> Callable[[int], float]:
    """From 1 down to 0.1."""
    return lambda step: 0.1 + 0.45 * (1 + math.cos(math.pi * min(step / steps, 1.0)))


def _why_not(method: Method) -> str:
    if method.traits.learned:
        return "its learned parameters learn in training, by the task's own loss"
    return "it has no learned parameters"
