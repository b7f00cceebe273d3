"""Partials of windows of queries, merged."""
