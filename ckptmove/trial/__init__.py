"""Checkpoints rehearsed: a model takes a state, and a step, on a device that is there or played."""
