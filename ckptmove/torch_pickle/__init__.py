"""Find what the inert nodes of a torch pickle mean: storages, tensors, sections, devices."""
