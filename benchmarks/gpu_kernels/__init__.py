"""Benchmarks of single kernels of the backend cuda."""
