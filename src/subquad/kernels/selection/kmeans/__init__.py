"""K-means of hash codes under Hamming distance."""
