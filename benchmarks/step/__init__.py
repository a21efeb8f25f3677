"""Benchmarks of what a training step costs in addition to its kernels, and of unequal workers."""
