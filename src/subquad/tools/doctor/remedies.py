"""Commands for the shells of this system, which install packages, build the kernels again and set variables."""

import json
import os
import platform
import shlex
import shutil
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any
from urllib.parse import urlparse
from urllib.request import url2pathname

_PACKAGE = Path(__file__).parents[2]
_COMPILERS = {"apt": "apt install g++", "dnf": "dnf install gcc-c++"}


def clone() -> Path | None:
    """The clone of the repository that this process runs, that was installed, or that is the current folder."""
    candidates = [_PACKAGE.parents[1], _installed_from().get("folder"), Path.cwd()]
    return next((path for path in candidates if path is not None and _is_clone(path)), None)


def install(*requirements: str) -> str:
    """Install these requirements, in the versions of the clone's constraints where there is a clone."""
    folder = clone()
    constraints = [] if folder is None else ["-c", _from_here(folder / "constraints.txt")]
    return _quoted(["pip", "install", *constraints, *requirements])


def install_extra(extra: str, requirements: Mapping[str, str]) -> str | None:
    """Install an extra from the clone; without a clone, the packages that it needs, by their lowest versions.

    None where these are not known either.
    """
    folder = clone()
    if folder is None and not requirements:
        return None
    if folder is None:
        return install(*(f"{package}>={least}" for package, least in requirements.items()))
    return install(*_editable(), f"{_from_here(folder)}[{extra}]")


def build_again() -> str:
    """Build the compiled kernels again, from the clone; without one, in the folder that is then the current one."""
    folder = clone()
    target = "." if folder is None else _from_here(folder)
    return _quoted(["pip", "install", "-v", "--force-reinstall", "--no-deps", *_editable(), target])  # -v: the errors


def install_compiler() -> str | None:
    """Install a C++ compiler; None where the way to do so is not known."""
    if platform.system() == "Darwin":
        return "xcode-select --install"
    command = next((words for program, words in _COMPILERS.items() if shutil.which(program)), None)
    return command if command is None or _is_root() else f"sudo {command}"


def set_variable(name: str, value: object) -> str:
    """Set a variable of the environment; on Windows, for the shells that are opened afterwards."""
    return f"setx {name} {value}" if platform.system() == "Windows" else f"export {name}={value}"


def _is_clone(folder: Path) -> bool:
    try:
        return (folder / "constraints.txt").is_file() and 'name = "subquad"' in (folder / "pyproject.toml").read_text(
            "utf-8"
        )
    except (OSError, UnicodeDecodeError):
        return False


def _installed_from() -> dict[str, Any]:
    """The folder that pip installed subquad from, and whether as an editable install; {} if from a file or an index."""
    try:
        recorded = json.loads(distribution("subquad").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        return {}
    if "dir_info" not in recorded:
        return {}
    folder = Path(url2pathname(urlparse(recorded["url"]).path))
    return {"folder": folder, "editable": recorded["dir_info"].get("editable", False)}


def _editable() -> list[str]:
    return ["-e"] if _installed_from().get("editable") else []


def _from_here(path: Path) -> str:
    """A path relative to the current folder if it is inside of it, else the whole path."""
    path = path.resolve()
    here = Path.cwd().resolve()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _quoted(words: Sequence[str]) -> str:
    if platform.system() == "Windows":  # whose shells share the double quotation mark alone
        return " ".join(f'"{word}"' if set(word) & set(" <>,[]=") else word for word in words)
    return shlex.join(words)


def _is_root() -> bool:
    return hasattr(os, "geteuid") and os.geteuid() == 0
