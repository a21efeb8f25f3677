"""Functions of single elements, dropout and copies: kernels and the operations that launch them."""
