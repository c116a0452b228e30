"""Checkpoints about to be written in another form: one graph, whatever file it comes from."""
