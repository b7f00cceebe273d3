"""Images and labels in the IDX format of MNIST and its likes (LeCun): a header of sizes, then bytes."""

import gzip
import struct
import zlib
from pathlib import Path

import numpy as np

from subquad.core.errors import InputError
from subquad.core.reading import read_bytes

UNSIGNED_BYTE = 0x08  # the only kind of number in these files


def read_idx(path: Path) -> np.ndarray:
    """The array in a file, gzipped or not, as uint8 of the shape in its header.

    Raises:
        InputError: no such file, another format or kind of number, or another size than in its header.
    """
    try:
        content = read_bytes(path)
        content = gzip.decompress(content) if path.suffix == ".gz" else content
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] != UNSIGNED_BYTE:
        raise InputError(
            f"{path} is not an IDX file of bytes: it begins with {content[:4].hex() or 'nothing'}, not 000008"
        )
    dimensions = content[3]
    start = 4 + 4 * dimensions
    shape = struct.unpack(f">{dimensions}I", content[4:start]) if len(content) >= start else ()
    wanted = int(np.prod(shape, dtype=np.int64)) if shape else None
    if wanted != len(content) - start:
        raise InputError(f"{path} has {max(0, len(content) - start):,} bytes after its header, which says {shape}")
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)
