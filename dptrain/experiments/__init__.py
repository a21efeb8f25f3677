"""Experiments with many cases: benchmarks of networks, and sweeps over settings and networks."""
