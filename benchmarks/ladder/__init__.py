"""A ladder from a naive matrix product to the convolution that trains, a rung a file."""
