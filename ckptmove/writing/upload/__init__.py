"""Objects of stores: sent in parts, verified, and seen once they are complete."""
