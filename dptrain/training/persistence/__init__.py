"""Files of a run directory: checkpoints, records of progress, and weights."""
