"""The state of a checkpoint, and whether a model and an optimizer take it."""
