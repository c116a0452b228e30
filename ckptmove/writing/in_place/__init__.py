"""Change a checkpoint in place, and undo that."""
