"""Run the items of a batch: in threads, in processes, or on a Ray cluster."""
