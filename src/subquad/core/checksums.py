"""Files that notice damage: a digest of everything in them, in them.

    save(path, state), load(path, …)           what torch saves, behind a line with its digest
    sealed_json(content), read_json(path, …)   a JSON object with the digest of its other members

A change to the content, or to the digest, makes them disagree: what reads them raises Damaged, whose message ends in
the remedy that it was given.
"""

import hashlib
import json
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from subquad.core import files
from subquad.core.errors import InputError

DIGEST = "digest"
_MARK = b"subquad sealed "


class Damaged(InputError):
    """A file differs from what was written; the message names the file and the remedy."""

    def __init__(self, path: Path, what: str, remedy: str):
        super().__init__(f"{path} is damaged: {what}; {remedy}")


def save(path: Path, state: Any) -> None:
    """Write tensors and plain data, behind a line with their digest."""
    buffer = BytesIO()
    torch.save(state, buffer)
    data = buffer.getvalue()
    files.write(path, _MARK + digest(data).encode() + b"\n" + data)


def load(path: Path, remedy: str, device: torch.device | None = None) -> Any:
    """Read the object that `save` wrote."""
    head, _, data = read_bytes(path, remedy).partition(b"\n")
    if not head.startswith(_MARK):
        raise Damaged(path, "it does not begin with a digest", remedy)
    if head != _MARK + digest(data).encode():
        raise Damaged(path, "its contents differ from what was written", remedy)
    return torch.load(BytesIO(data), map_location=device, weights_only=True)


def sealed_json(content: Mapping[str, Any]) -> bytes:
    """A JSON object with a digest of its other members."""
    return json.dumps({**content, DIGEST: digest_of(content)}, indent=1).encode() + b"\n"


def read_json(path: Path, remedy: str) -> dict[str, Any]:
    """The members of a `sealed_json` object, without the digest."""
    return opened(parsed(path, remedy), path, remedy)


def parsed(path: Path, remedy: str) -> dict[str, Any]:
    """The members of a JSON object, without a check of its digest."""
    try:
        content = json.loads(read_bytes(path, remedy))
    except (ValueError, RecursionError) as error:
        raise Damaged(path, f"it is not JSON ({error})", remedy) from None
    if not isinstance(content, dict):
        raise Damaged(path, "it is not a JSON object", remedy)
    return content


def opened(content: Mapping[str, Any], path: Path, remedy: str) -> dict[str, Any]:
    """The members of a `sealed_json` object that was read from `path`, without the digest."""
    if DIGEST not in content:
        raise Damaged(path, "it has no digest (earlier versions wrote none)", remedy)
    plain = {name: value for name, value in content.items() if name != DIGEST}
    if content[DIGEST] != digest_of(plain):
        raise Damaged(path, "its contents differ from what was written", remedy)
    return plain


def read_bytes(path: Path, remedy: str) -> bytes:
    """The bytes of a file; Damaged where it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise Damaged(path, f"it cannot be read ({error.strerror})", remedy) from None


def digest_of(content: Mapping[str, Any]) -> str:
    """The digest of plain data, however its JSON is laid out."""
    plain = json.loads(json.dumps(content))  # keys become text, tuples lists
    return digest(json.dumps(plain, sort_keys=True).encode())


def digest(data: bytes) -> str:
    """The digest of bytes in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()
