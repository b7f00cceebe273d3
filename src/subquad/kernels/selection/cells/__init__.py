"""Cells of keys that are alike, with values that are alike."""
