"""Side-by-side runs against PyTorch and against what the machine can do."""
