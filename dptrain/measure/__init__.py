"""Measurement of every stage of every step on every rank, and the files with the results."""
