"""What reproduces the papers: their experiments, and the tasks and data that only they need."""
