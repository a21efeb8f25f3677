"""Training: the loop and what it keeps on disk."""
