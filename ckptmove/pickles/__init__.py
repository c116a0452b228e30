"""Pickles as data: walk them into inert nodes, compare them, and write them."""
