"""The files of benchmarks/results as a part of the site, so that pages can link to them. A MkDocs hook.

A link such as `../../benchmarks/results/engines.md` leads to the file on GitHub; on the site it leads to its copy.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

FOLDER = "benchmarks/results"
TARGET = re.compile(r"(?<=\]\()[^)\s]+(?=\))")


def site_target(target: str, page: str) -> str:
    """The target of a link in a page (its path in docs/) as the site has it."""
    folder = posixpath.dirname(page)
    path = posixpath.normpath(posixpath.join("docs", folder, target))
    return posixpath.relpath(path, folder or ".") if path.startswith(FOLDER + "/") else target


def on_files(files: Any, config: Any) -> Any:
    """What MkDocs calls with the files of docs/: those of the results come to them, outside of the navigation."""
    from mkdocs.structure.files import File, InclusionLevel

    root = Path(config["docs_dir"]).parent
    for path in sorted((root / FOLDER).iterdir()):
        uri = path.relative_to(root).as_posix()
        files.append(File.generated(config, uri, abs_src_path=str(path), inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """What MkDocs calls with the text of a page."""
    uri = page.file.src_uri
    if uri.startswith(FOLDER + "/"):
        page.meta["search"] = {"exclude": True}
        return markdown
    return TARGET.sub(lambda target: site_target(target[0], uri), markdown)
