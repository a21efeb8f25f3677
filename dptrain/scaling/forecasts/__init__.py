"""Forecasts of the efficiency on more ranks, from the points of a study."""
