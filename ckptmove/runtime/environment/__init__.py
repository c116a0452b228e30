"""What the machine and the build of torch can do, and why a device cannot be used."""
