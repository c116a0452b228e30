"""Models in memory: what they hold, moving it, and watching it run."""
