"""Find root causes in what was recorded; each cause gives a verdict with its fix."""
