"""The arguments of an audit, recorded with a swapped transformers model."""

import json
from collections.abc import Mapping
from typing import Any

from subquad.core.whole_numbers import is_whole

DEFAULTS: dict[str, Any] = {
    "tolerance": None,
    "rows": 32,
    "every": 100,
    "allowed": 0.0,
    "on_exceed": "warn",
    "confidence": 0.95,
    "false_alarm": 0.05,
    "positions": 32,
    "baseline": None,
}


def record_audit(model: Any, settings: Mapping[str, Any]) -> None:
    """Write settings that are not the defaults, and the floor, into the record of the swap in the model's config.

    Raises:
        ValueError: the model has no such record.
    """
    from subquad.hf.layers import NAME  # audits of other modules need no transformers
    from subquad.hf.swapping import record
    from subquad.hf.unwrapping import transformers_model

    try:
        inner = transformers_model(model)
    except (TypeError, ValueError):
        inner = None
    if inner is None or not hasattr(inner.config, NAME):
        raise ValueError(
            f"the audit of this {type(model).__name__} cannot be recorded, because it is not a swapped transformers "
            "model; give sq.audit its arguments where the model is loaded"
        )
    settings = json.loads(json.dumps(dict(settings), default=_plain))  # such as numbers of NumPy
    changed = {name: settings[name] for name, default in DEFAULTS.items() if settings[name] != default}
    record(inner, audit=changed or None, floor=settings["floor"] or None)


def _plain(number: Any) -> int | float:
    """A number that can be written as JSON."""
    return int(number) if is_whole(number) else float(number)
