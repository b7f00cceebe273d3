"""Sums of the vectors of groups of tokens."""
