"""The model that the user names, and what is fed to it."""
