"""A decoder's prefill in OpenVINO with its sparse attention, XAttention (Xu et al. 2025, arXiv 2503.16428), on a CPU.

openvino-genai runs it under `use_sparse_attention`. Here the operator below that runs, from the package `openvino`
alone: the model is traced with a cache of keys and values, made stateful, and turned into paged attention, which has
the threshold as an input. So hidden states can be compared, which the pipelines of openvino-genai do not give.

XAttention estimates the weight of each block of 64 × 64 logits from every 8th antidiagonal, and for each block of
queries takes the fewest blocks whose estimated weights sum to the threshold. Block, stride and the threshold 0.8 are
the defaults of openvino-genai.
"""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from subquad.tools.models.pretrained import Pretrained

SPARSE = {f"XAttention, threshold {threshold}": threshold for threshold in (0.9, 0.8)}  # thresholds by row
BLOCK, STRIDE = 64, 8
CACHED = "sdpa-with-cache"
INPUTS = ("input_ids", "attention_mask", "position_ids", "beam_idx")  # the names that the paged form is found by
TRACED = 8, 4  # new tokens and earlier ones of the example; all lengths stay free


class Cache:
    """Keys and values of the layers during one call."""

    def __init__(self) -> None:
        self.past: list[Tensor] = []
        self.present: list[Tensor] = []
        self.mask: Tensor | None = None


def attend_with_cache(
    cache: Cache, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Exact attention over the cached keys and the new ones, in the form that OpenVINO recognises."""
    at = 2 * module.layer_idx
    key, value = torch.cat([cache.past[at], key], 2), torch.cat([cache.past[at + 1], value], 2)
    cache.present += [key, value]
    B, K, M, D = key.shape
    groups = query.shape[1] // K
    if groups > 1:
        key, value = (x.unsqueeze(2).expand(B, K, groups, M, D).reshape(B, K * groups, M, D) for x in (key, value))
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=cache.mask, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


class CachedStates(nn.Module):
    """Token ids and a cache to the last hidden states and the longer cache.

    With the head of a language model, the states become the logits of the last token.
    """

    def __init__(self, model: Any, cache: Cache, head: nn.Module | None = None):
        super().__init__()
        self.model, self.cache, self.head = model, cache, head

    def forward(
        self, ids: Tensor, valid: Tensor, positions: Tensor, beams: Tensor, *past: Tensor
    ) -> tuple[Tensor, ...]:
        cache = self.cache
        cache.past, cache.present = [each.index_select(0, beams) for each in past], []
        seen = (torch.arange(valid.shape[1])[None] <= positions[0][:, None]) & (valid[0] > 0)[None]
        cache.mask = torch.where(seen, 0.0, -1e9)[None, None]
        states = self.model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
        return states if self.head is None else self.head(states[:, -1:]), *cache.present


def save_stateful(model: Pretrained, path: Path, output: str = "states") -> None:
    """Convert the decoder with its cache as states of OpenVINO. `output`: "states", or "logits" of the last token."""
    import openvino
    from openvino import opset13
    from openvino._offline_transformations import apply_make_stateful_transformation

    cache, base = Cache(), copy.deepcopy(model.model.base_model)
    head = model.model.get_output_embeddings() if output == "logits" else None
    AttentionInterface.register(CACHED, partial(attend_with_cache, cache))
    AttentionMaskInterface.register(CACHED, lambda *_args, **_options: None)
    base.set_attn_implementation(CACHED)
    config = base.config
    heads, width = config.num_key_value_heads, getattr(config, "head_dim", None)
    width = width or config.hidden_size // config.num_attention_heads
    new, earlier = TRACED
    caches = [torch.zeros(1, heads, earlier, width) for _ in range(2 * config.num_hidden_layers)]
    ids, positions = torch.ones(1, new, dtype=torch.long), torch.arange(earlier, earlier + new)[None]
    valid, beams = torch.ones(1, earlier + new, dtype=torch.long), torch.zeros(1, dtype=torch.long)
    with torch.no_grad():
        made = openvino.convert_model(
            CachedStates(base, cache, head).eval(), example_input=(ids, valid, positions, beams, *caches)
        )
    pairs = {f"past.{number}": f"present.{number}" for number in range(len(caches))}
    for port, name in zip(made.inputs, (*INPUTS, *pairs), strict=True):
        port.get_tensor().set_names({name})
        port.get_node().set_friendly_name(name)
        shape = [-1] if name == "beam_idx" else [-1, -1] if name in INPUTS else [-1, heads, -1, width]
        port.get_node().set_partial_shape(openvino.PartialShape(shape))
    for port, name in zip(made.outputs, (output, *pairs.values()), strict=True):
        port.get_tensor().set_names({name})
    made.validate_nodes_and_infer_types()
    apply_make_stateful_transformation(made, pairs)
    tokens = opset13.shape_of(made.input("input_ids"), output_type="i64")
    batch = opset13.gather(tokens, opset13.constant([0]), opset13.constant(0))
    for node in made.get_ops():
        if node.get_type_name() == "ReadValue":  # starts empty, which the paged form asks to be said
            sizes = [batch, *(opset13.constant(np.array([size])) for size in (heads, 0, width))]
            empty = opset13.broadcast(opset13.constant(np.float32(0)), opset13.concat(sizes, 0))
            node.set_arguments([empty])
    made.validate_nodes_and_infer_types()
    openvino.save_model(made, path, compress_to_fp16=False)


def sparse_run(
    path: Path, model: Pretrained, length: int, threshold: float, precision: str, compiled: Callable[..., Any]
) -> Callable[[np.ndarray], tuple[np.ndarray, ...]]:
    """A prefill of `length` tokens with XAttention. `compiled`: compiles a model with a precision and settings."""
    import openvino
    from openvino._offline_transformations import paged_attention_transformation

    paged = openvino.Core().read_model(path)
    paged_attention_transformation(paged, allow_xattention=True)
    network = compiled(paged, precision, KV_CACHE_PRECISION=precision)
    head = model.model.get_output_embeddings().weight.detach().float().numpy()
    whole, scalar = (lambda values: np.array(values, np.int32)), (lambda value: np.array(value, np.int32))
    inputs: dict[str, Any] = {
        "position_ids": np.arange(length),
        "past_lens": whole([0]),
        "subsequence_begins": whole([0, length]),
        "max_context_len": scalar(length),
        "xattention_block_size": scalar(BLOCK),
        "xattention_stride": scalar(STRIDE),
    }
    for port in network.inputs:
        name = port.get_any_name()
        if name.startswith(("key_cache", "value_cache")):
            _, heads, rows, width = port.get_partial_shape()
            blocks = -(-length // rows.get_length())
            shape = [blocks, heads.get_length(), rows.get_length(), width.get_length()]
            inputs[name] = openvino.Tensor(port.get_element_type(), openvino.Shape(shape))
        elif name.startswith("xattention_threshold"):
            inputs[name] = np.array([threshold], np.float32)
    inputs |= {"block_indices": whole(range(blocks)), "block_indices_begins": whole([0, blocks])}

    def run(ids: np.ndarray) -> tuple[np.ndarray, ...]:
        results = network(inputs | {"input_ids": ids[0].astype(np.int64)})
        states = np.array(results["states"]).reshape(1, length, -1)
        return states, states[:, -1:] @ head.T

    return run
