"""Models in memory: list what they hold, move them, and watch them run."""
