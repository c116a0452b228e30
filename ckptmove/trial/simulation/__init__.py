"""Simulate a device that this machine does not have: torch's answers and operations on it."""
