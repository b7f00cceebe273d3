"""Fenced blocks of the language "math" as elements that assets/formulae.js sets with KaTeX. A MkDocs hook."""

from html import escape
from typing import Any


def formula(source: str, *_: Any, **__: Any) -> str:
    """A block as the page holds it; without JavaScript a reader sees its TeX."""
    return f'<div class="formula">{escape(source)}</div>'


def on_config(config: Any) -> Any:
    """Set up the blocks of formulae; MkDocs calls this before it reads the pages."""
    fence = {"name": "math", "class": "formula", "format": formula}
    config["mdx_configs"].setdefault("pymdownx.superfences", {})["custom_fences"] = [fence]
    return config
