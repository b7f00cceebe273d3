"""Nested tensors, whose items have lengths of their own, as padded ones, and back."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


@dataclass(frozen=True, eq=False)
class Padded:
    """A nested tensor (B, items' length, …) as a padded one, `values`, and the items' lengths, int (B,)."""

    values: Tensor
    lengths: Tensor
    inputs: Any

    def nested_like_it(self, padded: Tensor) -> Tensor:
        """A padded (B, longest, …) as a nested tensor with the items' lengths of the one given."""
        valid = torch.arange(padded.shape[1], device=padded.device) < self.lengths[:, None]
        if self.inputs.layout != torch.jagged:
            items = [item[:length] for item, length in zip(padded, self.lengths.tolist(), strict=True)]
            return torch.nested.as_nested_tensor(items)
        # With the same offsets, so that torch takes both lengths for one and can add the tensors.
        return torch.nested.nested_tensor_from_jagged(padded[valid], offsets=self.inputs.offsets())


def pad(nested: Any) -> Padded:
    """Fill a nested tensor (B, items' length, …) up with 0 to the longest item.

    Raises:
        ValueError: items that differ in another axis than their first; a jagged tensor with gaps between its items.
    """
    if nested.layout != torch.jagged:
        return _pad_strided(nested)
    if getattr(nested, "_ragged_idx", 1) != 1 or nested.lengths() is not None:
        raise ValueError(
            "this jagged tensor has gaps between its items, or its lengths are of another axis than the tokens'; give "
            "one made by torch.nested.nested_tensor(…, layout=torch.jagged)"
        )
    return Padded(torch.nested.to_padded_tensor(nested, 0.0), nested.offsets().diff(), nested)


def _pad_strided(nested: Any) -> Padded:
    """`pad` of the strided layout, whose items may differ in every axis and whose axes may be transposed."""
    items = nested.unbind()
    for item in items[1:]:
        if item.shape[1:] != items[0].shape[1:]:
            raise ValueError(
                f"the items of this nested tensor may differ in the number of tokens alone, (tokens, …), but there are "
                f"{tuple(items[0].shape)} and {tuple(item.shape)}"
            )
    lengths = torch.tensor([len(item) for item in items], device=nested.device)
    return Padded(pad_sequence(items, batch_first=True), lengths, nested)
