"""Convolutions whose blocks read a halo tile of the input from shared memory."""
