"""The page of the studies, with its tables and plots."""
