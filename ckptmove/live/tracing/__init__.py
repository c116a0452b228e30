"""Watching a model run, and why it runs where it does."""
