"""The page of a comparison of runs, profiles or studies."""
