"""The machine and the build of torch: what they can do, and why a device can not be used."""
