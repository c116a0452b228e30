"""List the tensors of a model in memory. Imports torch."""
