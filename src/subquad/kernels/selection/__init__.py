"""Choices: which queries meet which keys. Nothing here has a gradient."""
