"""The cudnn backend: NVIDIA's cuDNN, and kernels of the cuda backend for what it lacks."""

from dptrain.backends.cudnn.backend import CudnnBackend


def create() -> CudnnBackend:
    """Return the backend."""
    return CudnnBackend()
