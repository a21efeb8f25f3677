"""The page docs/developers/performance.md, from the results in benchmarks/results."""
