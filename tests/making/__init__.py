"""Makers of real checkpoints, a module a noun; `tests.making.checkpoints` is the door to them."""
