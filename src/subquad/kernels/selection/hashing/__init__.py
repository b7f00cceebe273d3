"""Sign-of-projection hashing: one 64-bit word for each vector."""
