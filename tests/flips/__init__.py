"""Trials with flipped bits, see `tests.flips.__main__`."""
