"""DeepSpeed: the files that its ranks saved, as one checkpoint."""
