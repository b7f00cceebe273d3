"""The nearest cluster of each query: the plain formula, the op, its backend."""
