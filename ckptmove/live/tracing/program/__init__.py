"""What the text of a program says: lines, names, settings and the devices that they choose."""
