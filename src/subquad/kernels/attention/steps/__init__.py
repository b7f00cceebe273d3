"""Exact attention of a few queries, as in steps on a cache."""
