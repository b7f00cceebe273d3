"""The run of a command: settings, cached results, executors."""
