"""Clusters, and the tokens that score highest, among the tokens of all ranks."""
