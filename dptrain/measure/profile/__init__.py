"""Profiles: times of parts, layers and ranks, efficiencies and losses, and their tables."""
