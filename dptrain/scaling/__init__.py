"""Scaling studies: launches over numbers of ranks, efficiencies, models, forecasts, reports."""
