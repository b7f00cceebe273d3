"""Exact attention to keys that come in blocks, of which no more than one is there at a time."""
