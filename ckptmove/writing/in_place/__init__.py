"""Change a checkpoint where it lies, and undo that."""
