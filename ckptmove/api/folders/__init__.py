"""The verbs for folders: they handle every file by its own format."""
