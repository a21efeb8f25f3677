"""Resampling of maps on the GPU."""
