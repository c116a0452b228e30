"""Checkpoints that ranks wrote together: their tensors consist of chunks in several files."""
