"""Pretrained models, and the passages that they read."""
