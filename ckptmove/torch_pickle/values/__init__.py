"""Storages, tensors and arrays among the nodes of a pickle."""
