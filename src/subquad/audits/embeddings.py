"""The distance of an encoder's embeddings from the exact model's, on a sample of its inputs.

    fidelity = cos(pool(hidden states with the methods), pool(hidden states with exact attention))

This is the figure of which a plan for embeddings keeps a floor. Pooling is the mean over real tokens, or the first one.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from subquad.audits.outputs import OutputWatch
from subquad.audits.report import LARGEST, EmbeddingReport
from subquad.audits.statistics import RunningMoments, mean_upper

POOLINGS = ("mean", "cls")


class WatchedForward:
    """The forward method of a model, before which a function is given its arguments.

    A copy of the model, also a pickled one, has the forward method that was there before, and is not watched.
    """

    def __init__(self, model: nn.Module, before: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]):
        self._model, self._before = model, before
        current = vars(model).get("forward")  # another library's, as accelerate puts one there; None: the class's
        self.wrapper: Any = current.wrapper if isinstance(current, WatchedForward) else current  # an earlier audit ends
        self.__signature__ = inspect.signature(model.forward)

    @torch.compiler.disable(reason="an audited model is not compiled: it counts inputs, and reads some again")  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward method."""
        self._before(self._model, args, kwargs)
        if self.wrapper is not None:
            return self.wrapper(*args, **kwargs)
        return type(self._model).forward(self._model, *args, **kwargs)

    def __reduce__(self) -> Any:
        return (getattr, (self._model, "forward")) if self.wrapper is None else (_itself, (self.wrapper,))


def _itself(forward: Any) -> Any:
    return forward


class EmbeddingWatch(OutputWatch):
    """Compares embeddings with a floor of their mean cosine."""

    def __init__(self, model: nn.Module, *, min_fidelity: float, pooling: str, **options: Any):
        super().__init__(model, accepted=1.0 - min_fidelity, **options)
        self._floor, self._pooling = min_fidelity, pooling
        self.losses, self.lowest, self.undefined = RunningMoments(), math.inf, 0
        self._watched: WatchedForward | None = None

    def start(self) -> None:
        """Watch the model's calls. SentenceTransformers call `forward` itself, for which torch runs no hooks."""
        self._watched = vars(self._model)["forward"] = WatchedForward(self._model, self._before)

    def stop(self) -> None:
        """Leave the model alone, with the forward method that it had."""
        wrapper = None if self._watched is None else self._watched.wrapper
        if self._watched is not None and vars(self._model).get("forward") is self._watched:
            del vars(self._model)["forward"]
            if wrapper is not None:
                vars(self._model)["forward"] = wrapper
        self._watched = None

    def report(self, delta: float) -> EmbeddingReport:
        """The results so far, with a bound at confidence 1 − δ."""
        with self._lock:
            losses, bound = self.losses, None
            if losses.largest <= LARGEST:
                bound = mean_upper(losses.mean, losses.variance, losses.count, delta, LARGEST)
            return EmbeddingReport(
                inputs=self.inputs,
                audited=self.audited,
                skipped=self.skipped,
                items=losses.count,
                undefined=self.undefined,
                fidelity=1 - losses.mean if losses.count else None,
                fidelity_bound=None if bound is None else max(1 - bound, -1.0),
                lowest=self.lowest if losses.count else None,
                floor=f"fidelity ≥ {self._floor:g}",
                evidence=self.evidence,
                alarm=self.alarm,
            )

    def _compare(self, inputs: Mapping[str, Any], valid: Bool[Tensor, "B N"]) -> None:
        mine, exact = self._both(lambda: self._pooled(inputs, valid))
        cosines = F.cosine_similarity(mine.double(), exact.double(), dim=-1)[valid.any(1)].tolist()
        with self._lock:
            self.undefined += sum(not math.isfinite(cosine) for cosine in cosines)
            cosines = [cosine if math.isfinite(cosine) else 0.0 for cosine in cosines]
            for cosine in cosines:
                self.losses.add(max(1.0 - cosine, 0.0))
                self.lowest = min(self.lowest, cosine)
            self._bet_on(sum(min(max(1.0 - cosine, 0.0), 1.0) for cosine in cosines) / len(cosines))

    def _pooled(self, inputs: Mapping[str, Any], valid: Bool[Tensor, "B N"]) -> Float[Tensor, "B width"]:
        """The embedding of each item."""
        options = {"use_cache": False} if "use_cache" in self._names else {}
        hidden = self._read(inputs, **options)[0].float().cpu()
        if self._pooling == "cls":
            return hidden[:, 0]
        return (hidden * valid[..., None]).sum(1) / valid.sum(1, keepdim=True).clamp(min=1)

    def _message(self) -> str:
        return (
            f"the embeddings have a mean cosine of {1 - self.losses.mean:.4g} to the exact model's on "
            f"{self.losses.count} inputs, and the floor is {self._floor:g}; use closer methods, or plan again on what "
            "the model reads now"
        )
