"""The page, plots and table that `python -m benchmarks.report` makes from the result files."""
