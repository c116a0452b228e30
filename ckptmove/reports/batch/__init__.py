"""What a batch returns: its plan, items, results, log and table."""
