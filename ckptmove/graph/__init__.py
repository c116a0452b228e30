"""A saved object as one graph, from any format: select, rename, cast, divide, compare, write."""
