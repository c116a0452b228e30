"""Show results and progress; write pages, and the files that a batch writes beside its outputs."""
