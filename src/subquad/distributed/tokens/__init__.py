"""Where the tokens of a rank stand among those of all ranks."""
