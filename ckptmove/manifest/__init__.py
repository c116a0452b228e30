"""What a checkpoint holds: tensors with names, dtypes and devices, and other records."""
