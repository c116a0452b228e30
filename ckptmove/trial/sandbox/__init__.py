"""Run code of a file: only allowed code, in a process that can do nothing else."""
