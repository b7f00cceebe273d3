"""What no rule gives: by model type, the class that stands for it and fields of its small config."""

from typing import Any

CLASSES: dict[str, str] = {}

CONFIGS: dict[str, dict[str, Any]] = {}
