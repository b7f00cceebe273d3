"""Exact keys of a cluster of queries, and all other keys as a few cells in the same softmax."""
