"""Data sources: each module opens one kind of data set."""
