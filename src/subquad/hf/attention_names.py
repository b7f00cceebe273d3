"""The names by which transformers is asked for a method, in `attn_implementation`.

    "subquad"                                       exact attention by this library's kernel: full:kernel=subquad
    "subquad:clustered-tail:clusters=64;topk=96"    a method as the command line writes it, after "subquad:"

A model with such a name has the method in all layers from its first forward pass on: `by_name`.
"""

from typing import Any

from subquad.hf.layers import NAME
from subquad.methods import Full, Method, resolve

PREFIX = f"{NAME}:"

# It is in files: never change it. It may not name sdpa, flash or flex, which transformers looks for in names.
SAVED_AS = (
    "subquad: this model was saved with its attention swapped; run `import subquad.hf` before loading it (pip install "
    "'subquad[hf]'), or give another attn_implementation to load it with its own exact attention"
)


def names_method(implementation: Any) -> bool:
    """True if the name of an attention implementation is "subquad", or begins with "subquad:"."""
    if not isinstance(implementation, str) or implementation == SAVED_AS:
        return False
    return implementation == NAME or implementation.startswith(PREFIX)


def method_of(implementation: str) -> Method:
    """The method that a name asks for.

    Raises:
        ValueError: it names no method, or a setting that the method does not have; or a method with learned parameters.
    """
    if implementation == NAME:
        return Full(kernel="subquad")
    text = implementation.removeprefix(PREFIX)
    if not text.strip():
        raise ValueError(
            f"attn_implementation={implementation!r} names no method after the colon; write {NAME!r} for exact "
            f"attention, or for example '{PREFIX}clustered-tail'"
        )
    try:
        method = resolve(text)
    except ValueError as error:
        raise ValueError(f"attn_implementation={implementation!r}: {error}") from None
    if method.traits.learned:
        raise ValueError(
            f"attn_implementation={implementation!r}: {method.label!r} has learned parameters, which a name does not "
            "contain; use sq.hf.load_adapter(model, folder), or sq.hf.swap(model, method) to train them"
        )
    return method


def name_of(method: str | Method) -> str:
    """The name that asks for a method: a method object, its text, or the name itself.

    >>> name_of("clustered:clusters=25"), name_of("subquad:local")
    ('subquad:clustered:clusters=25', 'subquad:local')
    """
    if names_method(method):
        return str(method)
    return f"{PREFIX}{method if isinstance(method, str) else resolve(method)}"
