"""The version of ckptmove."""

__version__ = "0.1.0"
