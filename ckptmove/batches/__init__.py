"""A verb for a whole tree: found, planned, done by several workers, and taken up again."""
