"""Pickles as data: walked into inert nodes, compared, and respelled."""
