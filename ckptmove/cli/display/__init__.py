"""What a command shows: output, progress, pages, and files that a batch leaves beside outputs."""
