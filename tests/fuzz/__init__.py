"""Random inputs, valid and damaged, whose results are compared with independent computations."""
