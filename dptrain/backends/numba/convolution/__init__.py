"""Convolutions: algorithms, their kernels, and their selection."""
