"""`subquad bench`."""
