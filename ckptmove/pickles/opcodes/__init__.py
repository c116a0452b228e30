"""The opcodes of pickles: what each of them does, and fast walks for long runs of them."""
