"""Balanced selection: the tokens that score highest in each bucket."""
