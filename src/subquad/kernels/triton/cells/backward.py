"""The backward pass: gradients of means, keys and values."""

from typing import Any

from torch import Tensor

from subquad.kernels.triton.cells.keys import Slots, differentiate_keys
from subquad.kernels.triton.cells.means import differentiate_means
from subquad.kernels.triton.launch import padded, rows, strides


def cells_backward(
    x: Any,
    centroids: Tensor,
    order: Tensor,
    offsets: Tensor,
    inside: Tensor | None,
    shift: Tensor,
    grads: tuple[Tensor | None, Tensor, Tensor, Tensor | None],
    slots: Slots | None,
    outputs: tuple[Tensor, Tensor],
) -> Tensor:
    """Fill the gradients of keys and values; return that of the means, (B,H,C,D) in fp32.

    Args:
        x: key, value and scale.
        centroids: the means of the forward pass, and `order`, `offsets`, `inside` too.
        shift: λ, (B,H,C,X).
        grads: dk̄ or None, dv̄, c, and the brackets for keys that are inside, (B,H,C); None: nothing.
        slots: gradients of the listed keys, (B,H,C·K,D) and (B,H,C·K,E), the numbers of these rows sorted by key,
            (B,G,·), and where each key's begin, (B,G,M+1).
        outputs: gradients of key and value, in any layout.
    """
    key, value = rows(x.key), rows(x.value)
    (_, H, C, D), (_, G, M, E) = centroids.shape, value.shape
    cell_keys, cell_values, constant, of_inside = grads
    common = {
        "centroids": centroids,
        "key": key,
        "value": value,
        **strides("key", key),
        **strides("value", value),
        "order": order,
        "inside": inside,
        "words": 0 if inside is None else inside.shape[3],
        "shift": shift,
        "cell_keys": cell_keys,
        "cell_values": cell_values,
        "constant": constant,
        "of_inside": of_inside,
        "scale": x.scale,
        **{"H": H, "G": G, "M": M, "C": C, "X": offsets.shape[2] - 1, "D": D, "E": E},
        **{"WIDTH": padded(D), "VALUES": padded(E)},
    }
    of_means = differentiate_means(common, key, value, offsets)
    differentiate_keys(common, key, value, offsets, slots, outputs)
    return of_means
