"""`subquad calibrate`."""
