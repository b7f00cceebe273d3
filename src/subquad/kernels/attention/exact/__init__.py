"""Exact attention with its log-sum-exp."""
