"""`subquad needle`."""
