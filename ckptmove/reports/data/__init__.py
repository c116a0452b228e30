"""The data in reports: plain objects that need no torch."""
