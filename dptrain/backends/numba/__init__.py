"""CPU kernels in Python, compiled by numba: float32, channels last, fused, on a thread pool."""

from dptrain.backends.numba.backend import NumbaBackend


def create() -> NumbaBackend:
    """The backend."""
    return NumbaBackend()
