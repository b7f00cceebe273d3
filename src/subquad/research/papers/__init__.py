"""Reproduction of the papers: their experiments, and the tasks and data that only they need."""
