"""The weights of `torch.nn.MultiheadAttention` under the names of `MultiheadAttention`."""

from typing import Any

from torch import Tensor, nn

_PROJECTIONS = ("q_proj", "k_proj", "v_proj")


def rename_torch_weights(layer: nn.Module, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Take torch's weights apart in a state dict, in place: `in_proj_weight`, `in_proj_bias`, `q_proj_weight`, …

    A hook of `load_state_dict`. Other names are left as they are.
    """
    for kind in ("weight", "bias"):
        together = state.pop(f"{prefix}in_proj_{kind}", None)
        if together is not None:
            rows = [getattr(layer, name).out_features for name in _PROJECTIONS]
            if sum(rows) != len(together):
                raise ValueError(
                    f"{prefix}in_proj_{kind} has {len(together)} rows, but the projections of this layer have "
                    f"{' + '.join(map(str, rows))}; torch's layer has as many key heads as query heads"
                )
            state.update(zip([f"{prefix}{name}.{kind}" for name in _PROJECTIONS], together.split(rows), strict=True))
    for name in _PROJECTIONS:
        if f"{prefix}{name}_weight" in state:
            state[f"{prefix}{name}.weight"] = state.pop(f"{prefix}{name}_weight")
