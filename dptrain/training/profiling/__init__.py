"""Profiles of training and inference: timed steps, losses of efficiency, and energy."""
