"""Reproduction of the papers, and training."""
