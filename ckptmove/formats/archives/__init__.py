"""Zips and tars whose records are checkpoints or describe tensors."""
