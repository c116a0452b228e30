"""The capabilities of the machine and the torch build, and why a device cannot be used."""
