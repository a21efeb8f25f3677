"""Dense layers: matrix products of any shape, and products with one sample."""
