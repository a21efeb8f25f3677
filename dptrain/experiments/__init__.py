"""Experiments with many cases: benchmarks of networks, and studies of variants of a network."""
