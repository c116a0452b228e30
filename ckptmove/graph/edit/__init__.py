"""Edit a graph before it is written: rename, cast, select."""
