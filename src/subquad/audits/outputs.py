"""Audits of a model's output: a sample of its inputs is read twice more, with its methods and with exact attention."""

from __future__ import annotations

import inspect
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from subquad.audits.audit_passes import running_exactly, running_method, uncounted
from subquad.audits.sampling import OneOfEvery
from subquad.audits.statistics import Betting
from subquad.core.versions import NAMES_OF_CACHE, cache_in
from subquad.kernels.transforms import transform

logger = logging.getLogger("subquad.audit")

TOKENS = "input_ids", "inputs_embeds"
LEFT_OUT = (*NAMES_OF_CACHE, "cache_position", "labels", "use_cache", "logits_to_keep", "return_dict")


class PreHook:
    """A forward pre-hook of a model; in a copy of the model, also a pickled one, it does nothing."""

    def __init__(self, before: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None] | None = None):
        self._before = before

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Call the function."""
        if self._before is not None:
            self._before(module, args, kwargs)

    def __reduce__(self) -> Any:
        return PreHook, ()


class OutputWatch(ABC):
    """Compares one input of every `every` that a model reads, at a random place in each such block.

    `accepted` is the largest expected loss of an input that raises no alarm, in [0, 1]; None: there is no alarm.
    """

    def __init__(self, model: nn.Module, *, every: int, accepted: float | None, false_alarm: float, seed: int):
        self._model, self._names = model, list(inspect.signature(model.forward).parameters)
        self._picked, self._lock = OneOfEvery(every, seed), threading.Lock()
        self._bet, self._alarm_at = None if accepted is None else Betting(0.0, accepted), 1 / false_alarm
        self._alarmed = False
        self._handle: Any = None
        self.inputs = self.audited = self.skipped = 0

    def start(self) -> None:
        """Watch the model's calls."""
        self._handle = self._model.register_forward_pre_hook(PreHook(self._before), with_kwargs=True)

    def stop(self) -> None:
        """Leave the model alone."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    @property
    def evidence(self) -> float | None:
        """The largest capital that the test of the floor had so far."""
        return None if self._bet is None else self._bet.peak

    @property
    def alarm(self) -> bool | None:
        """True if the floor is not kept; None if there is no floor."""
        return None if self._bet is None else self._bet.peak >= self._alarm_at

    def _is_input(self, inputs: Mapping[str, Any]) -> bool:
        """True if a call reads tokens and continues no cache."""
        tokens, past = token_input(inputs), cache_in(inputs)
        return tokens is not None and tokens.ndim >= 2 and (past is None or not int(past.get_seq_length()))

    def _read(self, inputs: Mapping[str, Any], **more: Any) -> Any:
        """The model's output for an input that is read again, without the caller's cache."""
        options = {name: value for name, value in inputs.items() if name not in LEFT_OUT}
        return self._model(**options, **more)

    @abstractmethod
    def _compare(self, inputs: Mapping[str, Any], valid: Bool[Tensor, "B N"]) -> None:
        """Read an input twice, and compare its outputs."""

    @abstractmethod
    def _message(self) -> str:
        """The log message of an alarm."""

    @torch.compiler.disable(reason="an audited model is not compiled: it counts inputs, and reads some again")  # type: ignore[untyped-decorator]
    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = dict(zip(self._names, args, strict=False)) | kwargs
        if uncounted() or not self._is_input(inputs):
            return
        with self._lock:
            picked = self._picked(self.inputs)
            self.inputs += 1
        if not picked:
            return
        valid = valid_tokens(inputs)
        if module.training or transform() is not None or valid is None or not valid.any():
            with self._lock:
                self.skipped += 1
            return
        self._compare(inputs, valid)

    def _both(self, read: Any) -> tuple[Any, Any]:
        """The results of `read` with the methods of the layers and with exact attention."""
        with torch.no_grad(), running_method():
            mine = read()
        with torch.no_grad(), running_exactly():
            exact = read()
        return mine, exact

    def _bet_on(self, loss: float) -> None:
        """Count the loss of an input in [0, 1], and log an alarm once; the caller has the lock."""
        self.audited += 1
        if self._bet is None:
            return
        self._bet.add(loss)
        if self.alarm and not self._alarmed:
            self._alarmed = True
            logger.warning("%s (evidence %.3g, alarm at %.3g)", self._message(), self._bet.peak, self._alarm_at)


def token_input(inputs: Mapping[str, Any]) -> Tensor | None:
    """The tokens that a call reads, as numbers or embeddings; None of other inputs."""
    return next((inputs[n] for n in TOKENS if inputs.get(n) is not None), None)


def valid_tokens(inputs: Mapping[str, Any]) -> Bool[Tensor, "B N"] | None:
    """The real tokens; None if a mask of another shape does not show them, or the call does not read tokens."""
    tokens, mask = token_input(inputs), inputs.get("attention_mask")
    if tokens is None:
        return None
    if mask is None:
        return torch.ones(tokens.shape[:2], dtype=torch.bool, device="cpu")
    if not isinstance(mask, Tensor) or mask.shape != tokens.shape[:2]:
        return None
    return mask.cpu().bool()
