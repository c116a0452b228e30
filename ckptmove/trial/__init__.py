"""Try a checkpoint: load it into a model and take a step, on a real or a simulated device."""
