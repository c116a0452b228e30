"""What a checkpoint holds: tensors and their names, dtypes and devices, and other records."""
