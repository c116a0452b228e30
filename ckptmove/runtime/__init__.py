"""The only rooms that import torch."""
