"""Normalisation over samples, groups, channels and neighbours."""
