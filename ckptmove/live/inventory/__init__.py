"""Models in memory: where they are, moving them, and watching what they do. Imports torch."""
