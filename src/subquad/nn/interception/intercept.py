"""`intercept`: a method in every call of SDPA, in models that no other door leads into."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from subquad.methods import Method, resolve
from subquad.methods.core.current_shard import refuse_in_use
from subquad.nn.interception.call_sites import caller, is_ours
from subquad.nn.interception.log import InterceptionLog
from subquad.nn.interception.mode import SdpaCalls
from subquad.nn.interception.nested import taking_nested
from subquad.nn.sdpa_arguments import ENTRY_POINTS, prepare_sdpa, run_exactly


@contextmanager
def intercept(method: str | Method, *, strict: bool = False) -> Iterator[InterceptionLog]:
    """Run a method in place of `torch.nn.functional.scaled_dot_product_attention` for all calls in this thread.

        with sq.intercept("i-clustered:clusters=25") as seen:
            model(**inputs)
        print(seen)  # what ran where, and why not

    torch's `nn.MultiheadAttention`, `nn.TransformerEncoder` and `nn.TransformerDecoder` are seen too, in eval mode as
    well, where torch then leaves out its fused kernels: padded rows, which these return as 0, are computed, as torch
    does in training, and nested tensors are padded, and nested again. Masks are read as `Mask.from_sdpa` does. A call
    that the method cannot take runs exact attention, and `calls` has the reason: among others a mask that is not
    understood, dropout, nested tensors in a call of SDPA itself, attention weights that are asked for; for methods that
    mix queries, cross-attention, whose queries may come from a causal decoder; for methods of self-attention alone
    (`local`, …), calls without a causal mask, which may be either. subquad's own calls of SDPA are
    left alone.

    Args:
        method: a name, a name with settings, or a method object.
        strict: raise where a call would run exactly instead.

    Returns:
        A context manager that gives an `InterceptionLog`.

    Raises:
        ValueError: a method with learned parameters, which belong to one layer; in the model, under `strict`, a call
            that the method cannot take.

    SDPA is told which keys are padding and not which queries are: padded queries are computed like all others, so that
    methods that group queries (`clustered`, …) group them too. Nor is it told what is cross-attention: that of equal
    lengths looks like self-attention. `sq.hf.swap` and `sq.nn.swap` know more.

    In compiled code (`torch.compile`) the method runs too, and its calls are not in `calls`. A call that it cannot take
    is left out of the compiled graph and is in `calls`; with `fullgraph=True` it raises, with the reason.

    Inside of another `intercept`, the inner one alone has the calls: what it runs exactly, the outer one leaves alone.

    Gradient checkpointing runs the forward pass again: call `backward` inside the context. Other threads, such as those
    of `nn.DataParallel`, are not seen.

    >>> import torch, subquad as sq
    >>> layer = torch.nn.TransformerEncoderLayer(32, 4, batch_first=True).eval()
    >>> with torch.inference_mode(), sq.intercept("clustered:clusters=8") as seen:
    ...     out = layer(torch.randn(2, 100, 32))
    >>> seen.replaced, seen.exact
    (1, 0)
    """
    method = resolve(method)
    _refuse(method)
    calls = InterceptionLog(method)
    stand_in = _StandIn(method, calls, strict)
    with _without_fused_kernels(), SdpaCalls(stand_in, stand_in.cannot):
        yield calls


_lock = Lock()
_active: dict[str, Any] = {"contexts": 0, "fused before": True, "forward before": None}


@contextmanager
def _without_fused_kernels() -> Iterator[None]:
    """Switch torch's fused encoder layers off, in compiled code too, which would not see that a mode is active.

    Nested tensors, which torch's `nn.MultiheadAttention` takes by its fused kernels alone, run padded meanwhile.

    The switch is one for all threads: the last context to end, in whatever thread, puts it back.
    """
    with _lock:
        if _active["contexts"] == 0:
            _active["fused before"] = torch.backends.mha.get_fastpath_enabled()
            torch.backends.mha.set_fastpath_enabled(False)
            forward = nn.MultiheadAttention.forward
            _active["forward before"] = forward
            nn.MultiheadAttention.forward = taking_nested(forward)  # type: ignore[method-assign]
        _active["contexts"] += 1
    try:
        yield
    finally:
        with _lock:
            _active["contexts"] -= 1
            if _active["contexts"] == 0:
                torch.backends.mha.set_fastpath_enabled(_active["fused before"])
                nn.MultiheadAttention.forward = _active["forward before"]  # type: ignore[method-assign]


class _StandIn:
    """A replacement for SDPA, called with its arguments."""

    def __init__(self, method: Method, calls: InterceptionLog, strict: bool):
        self.method, self.calls, self.strict = method, calls, strict

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        if not torch.compiler.is_compiling() and is_ours():
            return run_exactly(*args, **kwargs)
        refuse_in_use("sq.intercept", "use sq.nn.swap(module, method), or call sq.attention(…, parallel=of)")
        try:
            prepared = prepare_sdpa(self.method, *args, **kwargs)
        except (TypeError, ValueError) as error:
            self.cannot(" ".join(str(error).split()))
            return run_exactly(*args, **kwargs)
        if not torch.compiler.is_compiling():
            self.calls.note(caller(), self.method.sdpa_instead(*prepared))
        return self.method.run(*prepared)

    def cannot(self, reason: str) -> None:
        """Note a call that runs exactly, or raise."""
        if torch.compiler.is_compiling():  # nothing can be noted there: the call is left out of the graph
            torch._dynamo.graph_break(f"sq.intercept: {reason}")
        if self.strict:
            raise ValueError(f"{self.calls.caller_name(caller())}: {reason}")
        self.calls.note(caller(), reason)


def _refuse(method: Method) -> None:
    """Raise ValueError where a method belongs to one layer."""
    if method.traits.learned:
        raise ValueError(
            f"{method.name!r} has learned parameters, which belong to one layer, and a call of SDPA does not show "
            f"its layer; {ENTRY_POINTS}"
        )
