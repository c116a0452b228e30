"""The verbs: each a short story of reading, planning, writing, verifying, committing."""
