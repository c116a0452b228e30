"""Run code from a file: only allowed code, in a process that can't do anything else."""
