"""A ladder of convolution kernels, from a naive matrix product to the kernels of dptrain."""
