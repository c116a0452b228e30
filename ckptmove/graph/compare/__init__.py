"""Compare two graphs, and what else their checkpoints hold."""
