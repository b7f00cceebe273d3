"""The registry: methods by name, in families. A method is put there by its definition."""

from typing import Any

from subquad.methods.core.traits import FAMILIES


def register(methods: dict[str, Any], method: Any) -> None:
    """Put a method among the others, in the place of one of its name that was there."""
    known = {**methods, method.name: method}
    methods.clear()
    methods.update(sorted(known.items(), key=lambda item: (FAMILIES.index(item[1].traits.family), item[0])))
