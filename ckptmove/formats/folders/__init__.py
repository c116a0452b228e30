"""Checkpoints of several files: indexes, and the folders of models."""
