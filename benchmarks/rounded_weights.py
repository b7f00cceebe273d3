"""Weights in fewer bits: the ways that `small_numbers.py` and `whole_requests.py` measure, by their names in tables.

The package torchao is needed for three of them: pip install -c constraints.txt -r benchmarks/request-requirements.txt
"""

import copy
import warnings
from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.ao.quantization import per_channel_dynamic_qconfig, quantize_dynamic

from subquad.tools.models.dtypes import convert

BF16_AND_INT8 = "bf16, int8 weights (torchao)"


def in_bf16(model: nn.Module) -> nn.Module:
    """Weights in bf16."""
    convert(model, torch.bfloat16)
    return model


def int8_dynamic(model: nn.Module) -> nn.Module:
    """Linear layers with int8 weights, one scale for each output, and inputs rounded with one scale for each call."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated in favour of torchao
        return quantize_dynamic(model, {nn.Linear: per_channel_dynamic_qconfig})


def int8_weights(model: nn.Module) -> nn.Module:
    """Linear layers with int8 weights, one scale for each output, and the inputs as they are."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model, Int8WeightOnlyConfig(version=2))
    return model


def int8_weights_and_inputs(model: nn.Module) -> nn.Module:
    """Linear layers with int8 weights, one scale for each output, and inputs rounded with one scale for each token."""
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    quantize_(model, Int8DynamicActivationInt8WeightConfig())
    return model


def unwrapped(*models: nn.Module) -> None:
    """Store torchao's weights as plain tensors, which compiled steps take without a call of Python for each."""
    from torchao.utils import unwrap_tensor_subclass

    for model in models:
        unwrap_tensor_subclass(model)


ROUNDINGS: Mapping[str, Callable[[nn.Module], nn.Module]] = {
    "fp32": lambda model: model,
    "bf16": in_bf16,
    "int8 dynamic (torch)": int8_dynamic,
    "int8 weights and inputs (torchao)": int8_weights_and_inputs,
    "int8 weights (torchao)": int8_weights,
    BF16_AND_INT8: lambda model: int8_weights(in_bf16(model)),
}


def rounded(model: nn.Module, kind: str) -> nn.Module:
    """A copy of a model in fp32 whose weights are rounded in one of the `ROUNDINGS`."""
    return ROUNDINGS[kind](copy.deepcopy(model))
