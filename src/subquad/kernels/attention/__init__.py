"""Parts: attention over some of the keys, or sums over them. Each op has its contract, its truth and its backends."""
