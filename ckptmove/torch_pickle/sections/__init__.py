"""The section of each part of a checkpoint, and the names of its tensors."""
