"""Masks: who may attend to whom, and masks of other libraries."""

from subquad.masks.mask import Mask

__all__ = ["Mask"]
