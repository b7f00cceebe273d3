"""Positions, slots, padding, packing and pools of tokens."""
