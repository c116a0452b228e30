"""Run code of a file: only what may be run, in a process that can do nothing else."""
