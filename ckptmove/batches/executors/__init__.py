"""Who does the items: threads, processes, a Ray cluster."""
