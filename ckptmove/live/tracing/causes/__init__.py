"""Find root causes in a recorded run; each cause gives a verdict with its fix."""
