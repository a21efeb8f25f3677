"""Convolutions by NVIDIA's cuDNN, everything else by the backend cuda."""

from dptrain.backends.cudnn.backend import CudnnBackend


def create() -> CudnnBackend:
    """The backend."""
    return CudnnBackend()
