"""Tensors made, read and written: the rooms below the verbs that import torch."""
