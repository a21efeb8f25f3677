"""Convolutions: tiles, their costs, and the operations that launch kernels."""
