"""Compare two graphs, and the other records of their checkpoints."""
