"""What reproduces the papers and trains."""
