"""Run a verb on every checkpoint of a tree: find, plan, do in parallel, and resume."""
