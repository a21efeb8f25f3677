"""What a run shows: progress, its first and last lines, and TensorBoard."""
