"""Convolutions with groups whose products run on tensor cores."""
