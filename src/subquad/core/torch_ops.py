"""Operators that torch's dispatcher, autograd, compiler and exporters know.

`torch.library.custom_op` would import torch's compiler at the first call of an operator, which takes 1.4 to 1.9 s in a
process that compiles nothing. `torch.library.Library`, the layer below it, imports nothing.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.library import Library, infer_schema, register_autograd, register_fake

LIBRARY = Library("subquad", "FRAGMENT")


def define(
    name: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    first: str = "",
    traced: Callable[..., Any] | None = None,
) -> Any:
    """Define the operator `subquad::name`, which `run` computes on every device, and return it.

    Args:
        run: computes the outputs, in new tensors; its arguments are positional.
        fake: makes empty outputs from the same arguments, for compilers. Its annotations are the operator's schema.
        first: arguments that come before those of `fake` in the schema, such as `"str backend"`; `fake` does not get
            them.
        traced: the function that compilers run in place of `fake`, with all arguments.
    """
    schema = infer_schema(fake, mutates_args=())
    skipped = first.count(",") + 1 if first else 0
    schema = f"({first}, {schema[1:]}" if first else schema
    # The layout of the inputs may decide that of the outputs; the tag also declares that compilers can trace it.
    LIBRARY.define(name + schema, tags=(torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag))
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    register_fake(f"subquad::{name}", traced or (lambda *args: fake(*args[skipped:])), lib=LIBRARY)
    return getattr(torch.ops.subquad, name).default


def differentiate(name: str, backward: Callable[..., Any], save: Callable[..., Any] | None = None) -> None:
    """Register the gradient of `subquad::name`; arguments as of `torch.library.register_autograd`."""
    register_autograd(f"subquad::{name}", backward, setup_context=save, lib=LIBRARY)
