"""The model that the user names, and its input."""
