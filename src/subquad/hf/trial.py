"""Runs of a model on small inputs, in which every attention call is recorded or compared with a record."""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask

from subquad.hf.boundary import attend, is_plain, make_mask
from subquad.hf.call_checks import unchecked
from subquad.hf.layers import NAME, Attached, Layer
from subquad.hf.mask_encoding import ALMOST_NOTHING
from subquad.hf.patterns import EVERYTHING, LayerPattern, read_pattern
from subquad.hf.saved import configs_of, default_implementation, is_ours
from subquad.masks import Mask
from subquad.methods import BoundMethod, Full
from subquad.methods.core.checks import without_autocast

RECORDED, TRIED = "subquad_recorded", "subquad_tried"
# Keywords that change the weights; sinks are logits of each head that take weight and give nothing.
_BESIDE_SOFTMAX = {"softcap": "capped logits", "s_aux": "sinks", "sinks": "sinks"}
ORIGINAL = "_subquad_before"  # on a swapped model: (config, its attention implementation) before the swap


@dataclass(frozen=True)
class TrialTrace:
    """The recorded behaviour of a layer."""

    sizes: tuple[int, int, int]
    cross: bool
    causal: bool
    window: int | None
    biased: bool
    beside_softmax: tuple[str, ...]
    reason: str | None  # the reason why the mask function is not understood

    def after(self, before: "TrialTrace | None", *, on_cache: bool) -> "TrialTrace":
        """Combine two records; a step on a cache adds only what is not known yet."""
        if before is None:
            return self
        if on_cache:
            return replace(before, reason=before.reason or self.reason)
        change = None
        if (before.causal, before.window) != (self.causal, self.window):
            change = "this layer sees other keys from one call to the next (causal or not, or another window)"
        return replace(
            self,
            cross=before.cross or self.cross,
            biased=before.biased or self.biased,
            beside_softmax=self.beside_softmax or before.beside_softmax,
            reason=before.reason or self.reason or change,
        )


@dataclass
class CallRecord:
    """One call of a layer's own attention. `allowed` (B|1,H|1,N,M) is who may see whom, `out` (B,N,H,E) the result.

    `query` (B,H,N,D) is what the attention function got.
    """

    module: nn.Module
    lengths: tuple[int, int]
    allowed: Tensor
    trace: TrialTrace
    out: Tensor
    query: Tensor

    @property
    def defined(self) -> bool:
        """True if every query sees a key."""
        return bool(self.allowed.any(-1).all())


@dataclass
class _Recorder:
    originals: dict[int, str]  # id of a config → its attention implementation
    default: str  # the implementation of other configs
    calls: list[CallRecord] = field(default_factory=list)
    # By the address of a mask's storage: the mask, which keeps the address its own, its pattern and `reason`.
    masks: dict[int | None, tuple[Any, LayerPattern | None, str | None]] = field(default_factory=dict)


_RECORDER: ContextVar[_Recorder] = ContextVar("recorder")


Run = Callable[[PreTrainedModel], Any]  # a forward pass, or a generation


def recorded_run(model: PreTrainedModel, run: Run) -> list[CallRecord]:
    """Run the model's own attention and masks, and write every call down."""
    implementations = originals(model)
    recorder = _Recorder(
        {id(config): implementation for config, implementation in implementations}, implementations[0][1]
    )
    token = _RECORDER.set(recorder)
    try:
        with undisturbed(model, RECORDED):
            run(model)
    finally:
        _RECORDER.reset(token)
    return recorder.calls


def _record_mask(*args: Any, mask_function: Any = None, config: Any = None, **options: Any) -> Tensor | None:
    recorder = _RECORDER.get()
    pattern, reason = None, None
    try:
        pattern = read_pattern(mask_function)
    except ValueError as error:
        reason = str(error)
    options["allow_is_causal_skip"] = False  # a mask that is left out would not show its pattern
    if pattern != EVERYTHING:
        options["allow_is_bidirectional_skip"] = False
    make = eager_mask if recorder.originals.get(id(config), recorder.default) == "eager" else sdpa_mask
    mask = make(*args, mask_function=mask_function, **options)
    if mask is not None:
        recorder.masks[mask.untyped_storage().data_ptr()] = (mask, pattern, reason)
    return mask


def _record_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, Any]:
    recorder = _RECORDER.get()
    implementation = recorder.originals.get(id(getattr(module, "config", None)), recorder.default)
    out, weights = _original_function(module, implementation)(
        module, query, key, value, _additive(attention_mask, implementation, query), **options
    )
    allowed = _allowed(module, query, key, attention_mask, options.get("is_causal"), implementation)
    N, M = query.shape[2], key.shape[2]
    address = None if attention_mask is None else attention_mask.untyped_storage().data_ptr()
    _, pattern, reason = recorder.masks.get(address, (None, None, None))
    if pattern is None:  # the mask came from elsewhere, or there was none
        causal, window = N == M > 1 and not bool(allowed.expand(*allowed.shape[:2], N, M).triu(1).any()), None
    else:
        causal, window = pattern.causal, pattern.window
    beside_softmax = dict.fromkeys(what for name, what in _BESIDE_SOFTMAX.items() if options.get(name) is not None)
    trace = TrialTrace(
        sizes=(query.shape[1], key.shape[1], query.shape[3]),
        cross=N != M,
        causal=causal,
        window=window,
        biased=options.get("position_bias") is not None,
        beside_softmax=tuple(beside_softmax),
        reason=reason,
    )
    out_kept = out.clone()  # the model may write into its own
    recorder.calls.append(CallRecord(module, (N, M), allowed, trace, out_kept, query))
    return out, weights


def _additive(mask: Tensor | None, implementation: str, query: Tensor) -> Tensor | None:
    """The mask as eager attention takes it, where it was made for a config that is none of the model's own."""
    if implementation != "eager" or mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, torch.finfo(query.dtype).min)


def _original_function(module: nn.Module, implementation: str) -> Any:
    """The attention function that the module calls under its own implementation."""
    forward = inspect.unwrap(type(module).forward)
    names = [name for name in forward.__code__.co_names if name.endswith("eager_attention_forward")]
    return forward.__globals__[names[0]] if implementation == "eager" and names else sdpa_attention_forward


def _allowed(
    module: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool | None, implementation: str
) -> Tensor:
    """The pairs that see each other by a mask as transformers reads it, bool (B|1,H|1,N,M)."""
    N, M = query.shape[2], key.shape[2]
    if mask is not None:
        return mask if mask.dtype == torch.bool else mask > ALMOST_NOTHING
    everything = torch.ones(1, 1, N, M, dtype=torch.bool, device=query.device)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    return everything.tril() if implementation != "eager" and causal and N > 1 else everything


# ---------------------------------------------------------------------- the trial


_HANDING_ON = {"__getitem__", "__get__", "size", "dim", "to", "as_subclass", "is_floating_point", "contiguous"}


class _EncodedMask(Tensor):
    """The mask of the trial. The model's own code may hand it on, and cut off what is not needed, but nothing else."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        if name not in _HANDING_ON:
            raise ValueError(
                f"its own code computes with the attention mask ({name}{_caller()}), which it would misread"
            )
        return super().__torch_function__(func, types, args, kwargs or {})


def _caller() -> str:
    """In which module the mask is used."""
    frame = sys._getframe(2)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            return f" in {type(owner).__name__}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


class _Compared(Attached):
    """Exact attention in one layer, each call held against the recorded one that comes next."""

    expected: Iterator[CallRecord]
    comparable: bool  # whether every query sees a key: else outputs are undefined, here and in later layers

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, mask: Mask, valid: Tensor | None = None, **options: Any
    ) -> Tensor:
        out = super().forward(query, key, value, mask=mask, valid=valid, **options)
        N, M = query.shape[2], key.shape[2]
        call = next(self.expected, None)
        if call is None or call.lengths[0] != N or call.lengths[1] < M:
            raise ValueError(
                f"layer {self.label} attends at other times, or to other keys, than with its own attention"
            )
        mask = mask if valid is None else mask & Mask.padding(keys=valid)
        trace = F.pad(
            mask.to_dense(N, M, query.device), (0, call.lengths[1] - M)
        )  # left out: slots that are not filled
        if bool(((trace != call.allowed) & call.allowed.any(-1, keepdim=True)).any()):
            raise ValueError(f"layer {self.label} would see other keys than with the model's own mask")
        if not self.comparable:
            return out
        have, want = out.transpose(1, 2).float(), call.out.float()
        finite = want.isfinite()  # what weights that are not finite make so is not compared
        apart = (have - want).where(finite, 0.0).abs().max()
        limit = 1e-3 if out.dtype in (torch.float32, torch.float64) else 5e-2  # ten times the rounding, or more
        if not bool(apart <= limit * want.where(finite, 0.0).abs().max()):
            raise ValueError(
                f"layer {self.label} computes more than softmax attention from its queries, keys and values"
            )
        return out


def trial_run(model: PreTrainedModel, layers: list[Layer], run: Run, calls: list[CallRecord]) -> Any:
    """Run the model with exact attention through the boundary; ValueError at the first call that differs."""
    of_module: dict[nn.Module, list[CallRecord]] = {}
    for call in calls:
        of_module.setdefault(call.module, []).append(call)

    def make(layer: Layer) -> Attached:
        heads, kv_heads, width = layer.sizes  # type: ignore[misc]
        attached = _Compared(layer, BoundMethod(Full(), heads=heads, kv_heads=kv_heads, head_dim=width))
        attached.expected = iter(of_module[layer.module])
        attached.comparable = all(call.defined for call in calls)
        return attached

    with attaching([layer for layer in layers if layer.module in of_module], make), undisturbed(model, TRIED):
        return run(model)


@contextmanager
def attaching(layers: list[Layer], make: Callable[[Layer], Attached]) -> Iterator[None]:
    """Attach to these layers what `make` makes for them, and afterwards what was there before."""
    before = {layer.module: layer.module._modules.get(NAME) for layer in layers}
    try:
        for layer in layers:
            layer.module.add_module(NAME, make(layer).eval())
        yield
    finally:
        for module, attached_before in before.items():
            module._modules.pop(NAME, None)
            if attached_before is not None:
                module.add_module(NAME, attached_before)


def _tried_mask(**options: Any) -> Tensor | None:
    mask = make_mask(**options)
    return mask if mask is None or is_plain(**options) else mask.as_subclass(_EncodedMask)


def _tried_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    if isinstance(attention_mask, _EncodedMask):
        attention_mask = attention_mask.as_subclass(Tensor)
    return attend(module, query, key, value, attention_mask, **options)


def same_outputs(outputs: Any, other: Any, dtype: torch.dtype) -> bool:
    """True if two results of a model agree in all floating-point tensors. Attention weights come from one only."""
    if isinstance(outputs, Tensor) and isinstance(other, Tensor):
        if not outputs.is_floating_point() or outputs.numel() == 0 or not bool(outputs.isfinite().all()):
            return True
        limit = 1e-2 if dtype in (torch.float32, torch.float64) else 0.25
        apart = (
            outputs.shape != other.shape
            or (outputs.float() - other.float()).abs().max() > limit * outputs.float().abs().max()
        )
        return not bool(apart) and bool(other.isfinite().all())
    if isinstance(outputs, Mapping) and isinstance(other, Mapping):
        return all(same_outputs(outputs[key], other[key], dtype) for key in outputs.keys() & other.keys())
    if isinstance(outputs, list | tuple) and isinstance(other, list | tuple):
        return all(same_outputs(a, b, dtype) for a, b in zip(outputs, other, strict=False))
    return True


# ---------------------------------------------------------------------- the model, left as it was


def originals(model: nn.Module) -> list[tuple[PreTrainedConfig, str]]:
    """Every config in the model, outermost first, with the attention implementation that the model has of its own."""
    swapped = {
        id(config): implementation
        for module in model.modules()
        for config, implementation in getattr(module, ORIGINAL, [])
    }
    implementations = [(c, owner, swapped.get(id(c), c._attn_implementation)) for c, owner in configs_of(model)]
    return [
        (
            c,
            default_implementation(owner, model)
            if implementation is None or is_ours(implementation)
            else implementation,
        )
        for c, owner, implementation in implementations
    ]


@contextmanager
def undisturbed(model: nn.Module, implementation: str | None = None) -> Iterator[None]:
    """The model in eval mode on its own attention, or on this one; its modes and torch's random numbers come back.

    Autocast is off. Messages of transformers about such inputs are suppressed.
    """
    verbosity = transformers.logging.get_verbosity()
    modes = {module: module.training for module in model.modules()}
    implementations = originals(model)
    before = [(config, config._attn_implementation) for config, _ in implementations]
    try:
        transformers.logging.set_verbosity_error()
        for config, kept in implementations:
            config._attn_implementation = implementation or kept
        model.eval()
        everywhere = {tensor.device for tensor in chain(model.parameters(), model.buffers())}
        devices = {device for device in everywhere if device.type == "cuda"}
        with (
            torch.random.fork_rng(devices, device_type="cuda"),
            torch.no_grad(),
            unchecked(model),
            ExitStack() as stack,
        ):
            for kind in {device.type for device in everywhere}:  # outputs are compared in the model's own dtype
                stack.enter_context(without_autocast(kind))
            torch.manual_seed(0)
            yield
    finally:
        transformers.logging.set_verbosity(verbosity)
        for config, name in before:
            config._attn_implementation = name
        for module, mode in modes.items():
            module.training = mode


def register_trials() -> None:
    """Tell transformers about the two implementations that trials run on."""
    AttentionInterface.register(RECORDED, _record_attention)
    AttentionMaskInterface.register(RECORDED, _record_mask)
    AttentionInterface.register(TRIED, _tried_attention)
    AttentionMaskInterface.register(TRIED, _tried_mask)
