"""A device that is not there: what torch would say and do on it."""
