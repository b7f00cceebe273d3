"""Importing this file raises an ImportError with the remedy if a package that `sq.hf` needs is missing or too old."""

from subquad.core.requirements import check

check(["transformers", "safetensors"], "hf")
