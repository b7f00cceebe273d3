"""`subquad compare`."""
