"""Read the source of a program: lines, names, settings, and the devices that they choose."""
