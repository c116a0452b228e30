"""Move a model and its batches to a device."""
