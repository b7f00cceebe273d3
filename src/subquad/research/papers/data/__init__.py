"""Readers and generators of the data that only the papers' tasks need."""
