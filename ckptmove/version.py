"""Which version of ckptmove this is."""

__version__ = "0.1.0"
