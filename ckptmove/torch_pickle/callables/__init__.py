"""The callables that a pickle names, how it uses them, and which are known to be harmless."""
