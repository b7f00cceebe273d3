"""Attention to the keys of all ranks, of which each has its own."""
