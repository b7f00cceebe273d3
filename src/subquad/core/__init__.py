"""Small things that know nothing of attention: errors, files, checksums, randomness, shapes, the environment."""
