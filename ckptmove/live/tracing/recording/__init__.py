"""Watch a program: each operation, and what the program made, moved and called."""
