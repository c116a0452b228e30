"""Safetensors files: tensors by name."""
