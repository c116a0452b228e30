"""Record a program: each operation, and the objects that it made, moved and called."""
