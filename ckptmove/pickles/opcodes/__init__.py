"""What each opcode of a pickle does, and how long runs of them are walked at once."""
