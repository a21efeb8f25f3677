"""Layers that rearrange maps: their channels, and their rows and columns."""
