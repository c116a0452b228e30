"""What will be written, decided before a byte is; and such a plan, divided."""
