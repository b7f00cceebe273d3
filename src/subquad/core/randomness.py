"""From a seed to random planes. Nothing here, or anywhere else, draws from the global generator.

What is drawn depends on the seed and the asked size alone, never on batch, length, padding or device: the numbers come
from a CPU generator and move to a device once, because a copy makes the program wait for the device. (Dropout on
attention weights is the exception: it follows torch's own generator, as every dropout does, so that activation
checkpointing replays it.)
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from subquad.core.torch_ops import define


@lru_cache(maxsize=256)  # of layers and seeds in use: a draw takes longer than clustered attention to 512 tokens
def _drawn(seed: int, rows: int, columns: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    blocks = -(-rows // columns)
    gauss = torch.randn(blocks, columns, columns, generator=generator, dtype=torch.float64, device="cpu")
    q, r = torch.linalg.qr(gauss)
    q = q * r.diagonal(dim1=-2, dim2=-1).sign()[:, None, :]  # else Householder's signs bias the directions
    return q.transpose(1, 2).reshape(-1, columns)[:rows].contiguous()


@lru_cache(maxsize=256)
def _kept(draw: Callable[..., Tensor], dtype: torch.dtype, device: torch.device, *arguments: Any) -> Tensor:
    """Random numbers on the device and in the dtype that are needed: later calls copy them there without waiting."""
    return draw(*arguments).to(device=device, dtype=dtype)


def _empty(seed: int, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(rows, columns, dtype=dtype, device=device)


def _copy_of_drawn(seed: int, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return _kept(_drawn, dtype, device, seed, rows, columns).clone()


# An operator because Dynamo can trace neither a Generator nor a draw that must come out the same at every call.
_orthogonal = define("orthogonal", _copy_of_drawn, _empty)


def orthogonal(seed: int, rows: int, columns: int, like: Tensor) -> Tensor:
    """`rows` random unit vectors of width `columns`, in `like`'s dtype and on its device.

    Each is uniform on the sphere, and each run of `columns` rows is orthogonal, so that together they cover the
    directions more evenly than independent ones.

    >>> import torch
    >>> planes = orthogonal(7, 6, 4, like=torch.zeros(1))
    >>> torch.equal(planes, orthogonal(7, 6, 4, like=torch.zeros(1)))
    True
    >>> torch.allclose(planes[:4] @ planes[:4].T, torch.eye(4), atol=1e-6)
    True
    """
    if _become_constants(rows, columns):
        return _constant(_drawn, like, seed, rows, columns)
    return _orthogonal(seed, rows, columns, like.dtype, like.device)


def _become_constants(*sizes: int) -> bool:
    """True if `torch.export` runs this, for known sizes: random numbers then become constants of the program."""
    exporting = torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()
    return exporting and all(isinstance(size, int) for size in sizes)


def _constant(draw: Callable[..., Tensor], like: Tensor, *sizes: int) -> Tensor:
    """Random numbers as values, although tensors have no values while they are traced."""
    with _disable_current_modes():
        drawn = draw(*sizes).clone()
    return drawn.to(device=like.device, dtype=like.dtype)


@lru_cache(maxsize=256)
def _normal_drawn(seed: int, rows: int, columns: int) -> Tensor:
    return _normal_rows(seed, torch.arange(rows, device="cpu"), columns)


def _normal_rows(seed: int, rows: Tensor, columns: int) -> Tensor:
    # Each number comes from its own row, column and the seed, so that fewer rows are the first of more rows.
    column = torch.arange(columns, device=rows.device)
    mixed = _mix(torch.full((), seed, dtype=torch.int64, device=rows.device))
    return torch.special.ndtri(_uniform(_mix(_mix(mixed + rows[..., None]) + column * _GOLDEN)))


_GOLDEN = -7046029254386353131  # 2⁶⁴ / the golden ratio, as a signed number


def _mix(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): every bit of the input changes half of the output's."""
    x = x + _GOLDEN
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        x = (x ^ (x >> shift & (2 ** (64 - shift) - 1))) * factor
    return x ^ (x >> 31 & (2**33 - 1))


def _copy_of_normal(seed: int, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return _kept(_normal_drawn, dtype, device, seed, rows, columns).clone()


_normal = define("normal", _copy_of_normal, _empty)


def normal(seed: int, rows: int, columns: int, like: Tensor) -> Tensor:
    """Independent standard normal numbers, in `like`'s dtype and on its device. More rows begin with the same ones.

    >>> import torch
    >>> few, many = (normal(7, rows, 3, like=torch.zeros(1)) for rows in (2, 5))
    >>> torch.equal(few, many[:2])
    True
    """
    if _become_constants(rows, columns):
        return _constant(_normal_drawn, like, seed, rows, columns)
    return _normal(seed, rows, columns, like.dtype, like.device)


def normal_rows(seed: int, rows: Tensor, columns: int, like: Tensor) -> Tensor:
    """The rows of `normal` with these numbers, (…, columns), computed on the device of `rows`.

    >>> import torch
    >>> every = normal(7, 5, 3, like=torch.zeros(1))
    >>> torch.equal(normal_rows(7, torch.tensor([[4], [1]]), 3, like=torch.zeros(1)), every[[4, 1]][:, None])
    True
    """
    return _normal_rows(seed, rows, columns).to(device=like.device, dtype=like.dtype)


def _directions_drawn(
    seed: int,
    rows: int,
    columns: int,
    independent: bool,
    normals: Callable[..., Tensor] = _normal_drawn,
    rotation: Callable[..., Tensor] = _drawn,
) -> Tensor:
    gauss = normals(seed, rows, columns)
    # The norms of other normal rows than those that the rotation would be made of, so that they are independent of it.
    return gauss.clone() if independent else rotation(seed, rows, columns) * gauss.norm(dim=1, keepdim=True)


@lru_cache(maxsize=256)
def _last_of(seed: int, rows: int, columns: int, independent: bool, dtype: torch.dtype, device: torch.device) -> Any:
    """The number of the last redraw, and what was drawn: earlier ones are not used again, so one is kept."""
    return {}


def _redrawn(
    seed: int, draw: Tensor, rows: int, columns: int, independent: bool, dtype: torch.dtype, device: torch.device
) -> Tensor:
    number = int(draw)
    if number == 0:
        return _kept(_directions_drawn, dtype, device, seed, rows, columns, independent).clone()
    last = _last_of(seed, rows, columns, independent, dtype, device)
    drawn = last.get(number)
    if drawn is None:
        uncached = _normal_drawn.__wrapped__, _drawn.__wrapped__
        drawn = _directions_drawn((seed + number) % 2**63, rows, columns, independent, *uncached)
        drawn = drawn.to(device=device, dtype=dtype)
        last.clear()
        last[number] = drawn
    return drawn.clone()


def _empty_directions(
    seed: int, draw: Tensor, rows: int, columns: int, independent: bool, dtype: torch.dtype, device: torch.device
) -> Tensor:
    return torch.empty(rows, columns, dtype=dtype, device=device)


_directions = define("directions", _redrawn, _empty_directions)


def directions(seed: int, draw: Tensor | None, rows: int, columns: int, independent: bool, like: Tensor) -> Tensor:
    """Standard normal rows, in `like`'s dtype and on its device: independent, or orthogonal in runs of `columns`.

    `draw`, a whole number (), counts redraws: each is that of the seed so much further. It may change from call to call
    in a compiled function; it is read, which waits for the device that it is on.

    >>> import torch
    >>> of = lambda seed, draw: directions(seed, torch.tensor(draw), 6, 4, False, like=torch.zeros(1))
    >>> torch.equal(of(7, 1), of(8, 0)), torch.equal(of(7, 1), of(7, 0))
    (True, False)
    """
    if draw is None and _become_constants(rows, columns):
        return _constant(_directions_drawn, like, seed, rows, columns, independent)
    draw = torch.tensor(0, device="cpu") if draw is None else draw
    return _directions(seed, draw, rows, columns, independent, like.dtype, like.device)


def gumbel(seed: int, step: Tensor, indices: Tensor, like: Tensor) -> Tensor:
    """Independent standard Gumbel numbers −ln(−ln u), one for each place (a whole number), in `like`'s dtype.

    A number depends on the seed, the step and its place alone. The step may change from call to call in a compiled
    function, because nothing is drawn: the numbers are computed, on the device of `indices`.

    >>> import torch
    >>> places, zero = torch.arange(6), torch.tensor(0)
    >>> torch.equal(gumbel(7, zero, places, like=torch.zeros(1))[:2], gumbel(7, zero, places[:2], like=torch.zeros(1)))
    True
    """
    started = _mix(_mix(torch.full((), seed, dtype=torch.int64, device=indices.device)) + step.to(indices.device))
    return (-(-_uniform(_mix(started + indices * _GOLDEN)).log()).log()).to(device=like.device, dtype=like.dtype)


def uniform(seed: int, *numbers: Tensor) -> Tensor:
    """Independent uniform numbers inside (0, 1), in fp64: one for each combination of whole numbers, broadcast.

    A number depends on the seed and on its own whole numbers alone. Nothing is drawn: as in `gumbel`.

    >>> import torch
    >>> row, column = torch.arange(6)[:, None], torch.arange(3)
    >>> torch.equal(uniform(7, row, column)[4, 2], uniform(7, torch.tensor(4), torch.tensor(2)))
    True
    """
    mixed = _mix(torch.full((), seed, dtype=torch.int64, device=numbers[0].device))
    for number in numbers:
        mixed = _mix(mixed + number * _GOLDEN)
    return _uniform(mixed)


def _uniform(mixed: Tensor) -> Tensor:
    """Numbers inside (0, 1) from the upper 52 bits of these words."""
    return ((mixed >> 12 & (2**52 - 1)).double() + 0.5) / 2**52
