"""Simulate a device that this machine does not have: what torch would answer and do on it."""
