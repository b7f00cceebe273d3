"""The folders of real data: a folder that the user names, with a folder in it for each source."""

from pathlib import Path

from subquad.core.errors import InputError
from subquad.core.reading import exists, is_folder


def find_data(data: Path | None, folder: str, file: str, whose: str) -> Path:
    """`data`/`folder`/`file`, or `data`/`file` where the user named the source's own folder.

    Args:
        whose: what needs it, as worded in the message, such as "the task 'text'".

    Raises:
        InputError: no data folder was given, or the file is not in it; names both places.
    """
    if data is None:
        raise InputError(f"{whose} needs its data: --data-dir FOLDER, or the environment variable SUBQUAD_DATA")
    candidates = (data / folder / file, data / file)
    for path in candidates:
        if exists(path):
            is_folder(path)  # refuses what is neither a folder nor a regular file
            return path
    raise InputError(f"{whose} needs {file}, but it is not at {' or '.join(map(str, candidates))}")
