"""Training runs on disk: list, filter, compare, label and cite them."""
