"""Conversions: decide how a checkpoint is written in another format, and what changes."""
