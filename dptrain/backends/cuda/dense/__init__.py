"""Dense layers: tiles and the operations that launch kernels."""
