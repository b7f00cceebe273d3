"""Importing this file raises an ImportError with the remedy if torch is missing or too old for subquad."""

from subquad.core.requirements import check

check(["torch"])
