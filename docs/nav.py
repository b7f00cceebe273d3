"""Folders in the navigation (`methods/`) are their pages: a new page is listed by being there. A MkDocs hook."""

from pathlib import Path
from typing import Any


def expanded(nav: list[Any], docs: Path) -> list[Any]:
    """The navigation with every entry that ends in "/" replaced by that folder's pages, in place."""
    pages: list[Any] = []
    for entry in nav:
        if isinstance(entry, str) and entry.endswith("/"):
            pages += [{page.stem: entry + page.name} for page in sorted((docs / entry).glob("*.md"))]
        elif isinstance(entry, dict):
            pages += [
                {title: expanded(part, docs) if isinstance(part, list) else part} for title, part in entry.items()
            ]
        else:
            pages.append(entry)
    return pages


def on_config(config: Any) -> Any:
    """Expand the folders in the navigation; MkDocs calls this before it reads the pages."""
    config["nav"] = expanded(config["nav"], Path(config["docs_dir"]))
    return config
