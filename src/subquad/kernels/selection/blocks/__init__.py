"""Tokens sorted by label into blocks of one label each."""
