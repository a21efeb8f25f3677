"""The cudnn backend: NVIDIA's cuDNN computes convolutions, the cuda backend everything else."""

from dptrain.backends.cudnn.backend import CudnnBackend


def create() -> CudnnBackend:
    """Return the backend."""
    return CudnnBackend()
