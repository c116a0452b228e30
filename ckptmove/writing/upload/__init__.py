"""Upload objects: in parts, verified, visible only when complete."""
