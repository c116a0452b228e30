"""Zip files: read strictly, and laid out as torch does."""
