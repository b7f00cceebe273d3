"""The files of benchmarks/results as a part of the site, so that pages can link to them. A MkDocs hook.

A link such as `../../benchmarks/results/engines.md` leads to the file on GitHub; on the site it leads to its copy.
`../../benchmarks/results/` leads to the folder there, and to a list of the files on the site.
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
    path = f"{path}/index.md" if path == FOLDER else path
    return posixpath.relpath(path, folder or ".") if path.startswith(f"{FOLDER}/") else target


def index(folder: Path) -> str:
    """A page that lists the sheets with their titles."""
    titles = {path.stem: path.read_text("utf-8").partition("\n")[0].removeprefix("# ") for path in folder.glob("*.md")}
    items = (f"- [{name}]({name}.md): {title}" for name, title in sorted(titles.items()))
    return "# Results of the scripts\n\n" + "\n".join(items) + "\n"


def on_files(files: Any, config: Any) -> Any:
    """Add the files of the results, outside of the navigation; MkDocs calls this with the files of docs/."""
    from mkdocs.structure.files import File, InclusionLevel

    root, hidden = Path(config["docs_dir"]).parent, InclusionLevel.NOT_IN_NAV
    files.append(File.generated(config, f"{FOLDER}/index.md", content=index(root / FOLDER), inclusion=hidden))
    for path in sorted((root / FOLDER).iterdir()):
        uri = path.relative_to(root).as_posix()
        files.append(File.generated(config, uri, abs_src_path=str(path), inclusion=hidden))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Exclude results from the search, and fix links to them; MkDocs calls this with the text of every page."""
    uri = page.file.src_uri
    if uri.startswith(f"{FOLDER}/"):
        page.meta["search"] = {"exclude": True}
        return markdown
    return TARGET.sub(lambda target: site_target(target[0], uri), markdown)
