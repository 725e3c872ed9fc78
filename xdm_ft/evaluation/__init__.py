"""Metrics of predictions, intervals around differences, and the summary of a run's results."""
