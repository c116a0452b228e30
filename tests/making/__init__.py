"""Makers of real checkpoints, a module a noun; `tests.checkpoints` is the door to them."""
