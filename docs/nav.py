"""Folders in the navigation (`methods/`) are their pages: a new page is listed by being there. A MkDocs hook."""

from pathlib import Path
from typing import Any


def expanded(nav: list[Any], docs: Path) -> list[Any]:
    """The navigation with every top entry that ends in "/" as the list of that folder's pages."""
    return [
        {title: _pages(docs, part) if isinstance(part, str) and part.endswith("/") else part}
        for entry in nav
        for title, part in entry.items()
    ]


def _pages(docs: Path, folder: str) -> list[dict[str, str]]:
    return [{page.stem: folder + page.name} for page in sorted((docs / folder).glob("*.md"))]


def on_config(config: Any) -> Any:
    """What MkDocs calls before it reads the pages."""
    config["nav"] = expanded(config["nav"], Path(config["docs_dir"]))
    return config
