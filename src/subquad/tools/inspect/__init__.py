"""`subquad inspect`."""
