"""What reports are made of: plain data, which needs no torch."""
