"""Whole models as PyTorch, OpenVINO and ONNX Runtime run them: the same modules, converted for one length.

Every engine gets the same token ids, one item without padding. An encoder gives its embedding; a decoder its last
hidden states and the logits of the last token, as a prefill does.
"""

import copy
import hashlib
import json
import warnings
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from engine_sparse import SPARSE, save_stateful, sparse_run
from engine_workers import Row
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from subquad import hf
from subquad.core import files
from subquad.core.errors import InputError
from subquad.tools.models.pretrained import Pretrained, load

ENCODER = "encoder"
OPSET = 23  # the first with an operator for attention, which ONNX Runtime has fused kernels for
WITHOUT_MASK = "sdpa-without-mask"
CHANGE_ATTENTION = ("sliding_window", "local_size", "softcap", "s_aux", "position_bias")

Outputs = tuple[np.ndarray, ...]
Run = Callable[[np.ndarray], Outputs]


class WholeEncoder(nn.Module):
    """Token ids (1, N) to an embedding (1, width)."""

    def __init__(self, model: Any, pooling: str):
        super().__init__()
        self.model, self.pooling = model, pooling

    def forward(self, ids: Tensor) -> tuple[Tensor, ...]:
        states = self.model(input_ids=ids).last_hidden_state
        return (states[:, 0] if self.pooling == "cls" else states.mean(1),)


class WholePrefill(nn.Module):
    """Token ids (1, N) to the last hidden states (1, N, width) and the logits (1, 1, vocabulary) of the last token."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> tuple[Tensor, ...]:
        states = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        return states, self.model.get_output_embeddings()(states[:, -1:])


def pretrained(name: str, length: int) -> Pretrained:
    """The demo encoder under "encoder", otherwise as `load` takes names; its positions reach `length`.

    Raises:
        InputError: a masked language model, or a decoder whose learned positions do not reach so far.
    """
    own = load(None if name == ENCODER else name)
    if own.kind == "masked-lm":
        raise InputError(f"{name} is a masked language model; give an encoder of embeddings or a causal language model")
    if own.is_causal_lm and not own.is_rotary:
        own.length(length, "--prompts")
    return own.reaching(length)


def whole(model: Pretrained) -> nn.Module:
    """The module that is measured."""
    return (WholePrefill(model.model) if model.is_causal_lm else WholeEncoder(model.model, model.pooling)).eval()


def torch_run(module: nn.Module) -> Run:
    """The module itself as a function of token ids."""

    @torch.inference_mode()
    def run(ids: np.ndarray) -> Outputs:
        return tuple(out.float().numpy() for out in module(torch.from_numpy(ids)))

    return run


def torch_module(model: Pretrained, row: Row) -> nn.Module:
    """The whole model as a row runs it in PyTorch: with a method, FlexAttention, or compiled by zentorch's backend."""
    module = swapped(model, row.method)
    if row.engine == "flexattention":
        module.model.set_attn_implementation("flex_attention")  # which transformers compiles
    if row.engine == "zentorch":
        import zentorch  # it registers the backend, which leaves the model to Inductor on other processors

        if not zentorch._C.is_avx512_supported():
            raise InputError("zentorch does not optimise models on this processor")
        module = torch.compile(module, backend="zentorch")
    return module


def swapped(model: Pretrained, method: str | None) -> nn.Module:
    """The whole model with a method in all layers; it shares its weights with `model`, which stays as it is."""
    shared = {id(x): x for x in (*model.model.parameters(), *model.model.buffers())}
    mine = model.with_model(copy.deepcopy(model.model, shared))
    if method is not None:
        hf.swap(mine.model, method)
    return whole(mine)


# ---------------------------------------------------------------------- conversion


def attend_without_mask(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """Exact attention without padding as one call of SDPA, so that no engine gets an N×N mask as data.

    Raises:
        InputError: the layer has a window, or anything else that needs more than this call.
    """
    changes = [name for name in CHANGE_ATTENTION if others.get(name) is not None]
    if changes:
        raise InputError(
            f"attention with {changes[0]} is not converted; give a model whose layers attend to all tokens"
        )
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (x[:, :, None].expand(-1, -1, groups, -1, -1).flatten(1, 2) for x in (key, value))
    causal = getattr(module, "is_causal", False)
    out = F.scaled_dot_product_attention(query, key, value, scale=scaling, is_causal=causal)
    return out.transpose(1, 2).contiguous(), None


def traceable(model: Pretrained) -> nn.Module:
    """A copy of the whole model whose attention converts to one operator a layer."""
    AttentionInterface.register(WITHOUT_MASK, attend_without_mask)
    AttentionMaskInterface.register(WITHOUT_MASK, lambda *_args, **_options: None)
    module = swapped(model, None)
    module.model.set_attn_implementation(WITHOUT_MASK)
    return module


class Converted:
    """Converted models in a folder; what is there already is not converted again."""

    def __init__(self, folder: Path, name: str, length: int, packages: tuple[str, ...]):
        self.folder, self.name, self.length, self.packages = folder, name, length, packages

    def path(self, stem: str, model: Pretrained, convert: Callable[[Path], None], file: str) -> Path:
        """The file of one form of the model, converted first if it is not in the folder."""
        versions = [f"{package} {version(package)}" for package in ("torch", "transformers", *self.packages)]
        text = json.dumps([model.identity(), self.length, OPSET, versions], default=str)
        target = self.folder / f"{stem}-{self.length}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        if not target.exists():
            with files.whole_folder(target) as part, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of tracing: sizes become constants, which is meant
                convert(part / file)
        return target / file


def example(length: int) -> Tensor:
    """Token ids of the right shape."""
    return torch.ones(1, length, dtype=torch.long)


def openvino_runs(converted: Converted, model: Pretrained, threads: int) -> dict[str, Callable[[], Run]]:
    """The functions that compile the model for OpenVINO, by number format, or threshold of the sparse attention."""
    import openvino

    core = openvino.Core()

    def convert(path: Path) -> None:
        with torch.no_grad():
            ids = example(converted.length)
            made = openvino.convert_model(traceable(model), example_input=ids, input=[1, converted.length])
        openvino.save_model(made, path, compress_to_fp16=False)

    def convert_int8(path: Path) -> None:
        import nncf

        plain = core.read_model(converted.path("openvino", model, convert, "model.xml"))
        openvino.save_model(nncf.compress_weights(plain), path, compress_to_fp16=False)

    def network_of(made: Any, precision: str, **more: str) -> Any:
        wanted = {"f32": openvino.Type.f32, "bf16": openvino.Type.bf16}[precision]
        settings = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": threads}
        network = core.compile_model(made, "CPU", {**settings, "PERFORMANCE_HINT": "LATENCY", **more})
        used = network.get_property("INFERENCE_PRECISION_HINT")
        if used != wanted:
            raise InputError(f"OpenVINO computes in {used.to_string()} on this processor, not in {precision}")
        return network

    def compiled(path: Path, precision: str) -> Run:
        network = network_of(path, precision)

        def run(ids: np.ndarray) -> Outputs:
            results = network(ids)
            return tuple(np.array(results[at]) for at in range(len(network.outputs)))

        return run

    def fastest_precision() -> str:
        return "bf16" if "BF16" in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES") else "f32"

    def plain(precision: str) -> Run:
        return compiled(converted.path("openvino", model, convert, "model.xml"), precision)

    def int8() -> Run:
        return compiled(converted.path("openvino-int8", model, convert_int8, "model.xml"), fastest_precision())

    def sparse(threshold: float) -> Run:
        reach = load(None if converted.name == ENCODER else converted.name).limit
        if reach is not None and converted.length > reach:
            raise InputError(
                f"traced with a few tokens, it has the model's own positions; give at most {reach:,} tokens"
            )
        path = converted.path("openvino-stateful", model, partial(save_stateful, model), "model.xml")
        return sparse_run(path, model, converted.length, threshold, fastest_precision(), network_of)

    runs = {"fp32": lambda: plain("f32"), "bf16": lambda: plain("bf16"), "int8 weights": int8}
    return runs | {method: partial(sparse, threshold) for method, threshold in SPARSE.items()}


def onnxruntime_runs(converted: Converted, model: Pretrained, threads: int) -> dict[str, Callable[[], Run]]:
    """The functions that load the model into ONNX Runtime, by number format."""
    import onnxruntime

    def convert(path: Path) -> None:
        ids = example(converted.length)
        with torch.no_grad():
            program = torch.onnx.export(
                traceable(model), (ids,), dynamo=True, opset_version=OPSET, input_names=["ids"], verbose=False
            )
        program.save(path, external_data=True)

    def quantize(path: Path) -> None:
        from onnxruntime.quantization import QuantType, quantize_dynamic

        plain = converted.path("onnx", model, convert, "model.onnx")
        settings = {"weight_type": QuantType.QInt8, "per_channel": True, "use_external_data_format": True}
        # Of linear layers: this function takes every operator named Attention for another one of that name.
        quantize_dynamic(plain, path, op_types_to_quantize=["MatMul", "Gemm"], **settings)

    def session(path: Path) -> Run:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        options.add_session_config_entry("session.force_spinning_stop", "1")  # between calls, while others are timed
        loaded = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        return lambda ids: tuple(loaded.run(None, {"ids": ids}))

    return {
        "fp32": lambda: session(converted.path("onnx", model, convert, "model.onnx")),
        "int8 dynamic": lambda: session(converted.path("onnx-int8", model, quantize, "model.onnx")),
    }
