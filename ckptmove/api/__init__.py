"""The verbs as Python functions; each reads, plans, writes, verifies and commits."""
