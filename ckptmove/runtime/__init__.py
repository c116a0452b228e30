"""Everything that makes, reads and writes real tensors; this package imports torch."""
