"""Upload objects in parts; an object is verified, and visible only when complete."""
