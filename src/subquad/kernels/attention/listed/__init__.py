"""Attention of the members of clusters to what their cluster lists."""
