"""Tables, plots and pages drawn from a report."""
