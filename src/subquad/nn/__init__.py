"""Modules: attention layers that run any method."""

from subquad.nn.attention import MultiheadAttention

__all__ = ["MultiheadAttention"]
