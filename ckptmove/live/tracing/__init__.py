"""Watch a running model, and find out why it runs on the wrong device."""
