"""The pictures of the documentation, as SVGs that this package draws: `python docs/pictures [PART …]`."""
