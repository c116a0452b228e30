"""Watch a model run, and find out why it runs on the wrong device."""
