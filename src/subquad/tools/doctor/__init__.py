"""`subquad doctor`."""
