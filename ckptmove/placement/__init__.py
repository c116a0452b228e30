"""Decide which device each tensor goes to: the user's rules, and what follows from them."""
