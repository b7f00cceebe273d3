"""Attention by features: weights that are sums of products of features."""
