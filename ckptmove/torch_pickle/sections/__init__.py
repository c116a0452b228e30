"""What each part of a checkpoint serves, and what its tensors are called."""
