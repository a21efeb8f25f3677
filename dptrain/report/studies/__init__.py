"""The pages of scaling studies, sweeps and benchmarks."""
