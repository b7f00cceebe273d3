"""How a command runs: settings, cached results, executors."""
