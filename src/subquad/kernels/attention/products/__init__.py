"""Causal products: sums over the past, as they are and with gates that forget."""
