"""The rest: attention to all keys, less what it gives those that other parts count by themselves."""

import torch
from jaxtyping import Float
from torch import Tensor

Partial = tuple[Float[Tensor, "B H N E"], Float[Tensor, "B H N"]]
ROUNDING = 64  # in units of the dtype's resolution: less than this of the rest is rounding error


def merge_with_residual(met: Partial, everything: Partial, of_met: Partial) -> Partial:
    """Merge `met`, attention to some keys, with that to `everything`, less `of_met`, what the latter gave those keys.

        lse = ln (e^{lse_m} + e^{lse_e} − e^{lse_o})
        out = (e^{lse_m} out_m + e^{lse_e} out_e − e^{lse_o} out_o) / e^lse

    Weights are subtracted once and divided by the sum of what remains. If nothing remains of `everything` but
    rounding, as where all visible keys were met, it is left out, and the result is `met`.
    """
    outs, lses = zip(met, everything, of_met, strict=True)
    largest = torch.stack([lse.detach() for lse in lses]).amax(0)
    largest = torch.where(torch.isneginf(largest), 0.0, largest)
    of_exact, of_all, of_known = ((lse - largest).exp() for lse in lses)
    left = of_all - of_known
    none = left <= of_all * (ROUNDING * torch.finfo(left.dtype).eps)  # false for NaN, which is passed on
    of_all, of_known, left = (x.masked_fill(none, 0.0) for x in (of_all, of_known, left))
    total = of_exact + left
    present = total != 0
    safe = torch.where(present, total, 1.0)
    out = outs[0].new_zeros(outs[0].shape)
    for weight, each, sign in zip((of_exact, of_all, of_known), outs, (1.0, 1.0, -1.0), strict=True):
        part = (weight / safe)[..., None] * each
        out = out + sign * part.masked_fill((weight == 0)[..., None], 0.0)
    return out, torch.where(present, safe.log() + largest, -torch.inf)
