"""Attention of queries to the keys that they meet in buckets."""
