"""Change what a graph holds before it is written: other names, other dtypes, less of it."""
