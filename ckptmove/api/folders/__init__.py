"""What the verbs do with a folder: all its files, each by its own format."""
