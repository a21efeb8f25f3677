"""Trained networks for other programs, and networks of other programs."""
