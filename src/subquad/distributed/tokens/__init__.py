"""The positions of a rank's tokens among those of all ranks."""
