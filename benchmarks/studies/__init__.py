"""The published results of four studies, measured again: `python -m benchmarks.studies --help`."""
