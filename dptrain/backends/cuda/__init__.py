"""Kernels of our own on an NVIDIA GPU, through CuPy."""

from dptrain.backends.cuda.backend import CudaBackend


def create() -> CudaBackend:
    """The backend."""
    return CudaBackend()
