"""Auxiliary losses: of methods with parameters that get no gradient from the output, or a price of their size."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from subquad.kernels.precision import upcast
from subquad.kernels.tokens.packing import take_apart
from subquad.methods.core.call import Call
from subquad.methods.core.checks import without_autocast


class AuxiliaryLoss:
    """The auxiliary loss of a method: none, unless its class defines `auxiliary_loss`."""

    def auxiliary_loss(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor | None:
        """A loss for parameters without a gradient from the output, or a price of their size; None if there is none.

        Inputs are constants in fp32 or fp64, one batch item a segment: see `run_auxiliary_loss`. The output's gradient
        to parameters of the first kind is exactly 0.
        """
        return None

    def loss_of_heads(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor | None:
        """The share of the heads of this call in the auxiliary loss, which is a mean over heads."""
        loss = self.auxiliary_loss(query, key, value, call)
        return loss if loss is None or call.heads is None else loss * (call.heads.count / call.heads.total)

    @property
    def has_auxiliary_loss(self) -> bool:
        """True if the method, or one of its parts, has an auxiliary loss."""
        return type(self).auxiliary_loss is not AuxiliaryLoss.auxiliary_loss

    def run_auxiliary_loss(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor | None:
        """The auxiliary loss on inputs from `prepare`. Its gradient to query, key and value is exactly 0."""
        if not self.has_auxiliary_loss:
            return None
        with without_autocast(query.device.type):
            if call.parallel is not None:
                return call.parallel.auxiliary_loss(self, query, key, value, call)
            (query, key, value), mask = upcast(query.detach(), key.detach(), value.detach()), call.mask
            if call.kept is not None:  # the method does not see them
                mask, call = call.kept.left_out_of(mask, query.shape[2]), replace(call, kept=None)
            if mask.ids:
                (query, key, value), mask, _ = take_apart((query, key, value), mask)
            return self.loss_of_heads(query, key, value, call.under(mask))

    def fit_loss(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor | None:
        """The loss that `subquad calibrate` minimises, without gradient to query, key and value; None: nothing to fit.

        The auxiliary loss, unless the method's file has its own, such as `methods.core.fitting.output_error`.
        """
        return self.run_auxiliary_loss(query, key, value, call)
