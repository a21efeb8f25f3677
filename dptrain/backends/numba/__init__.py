"""CPU kernels in Python, compiled by numba: float32, channels last, fused, on a team of threads."""

from dptrain.backends.numba.backend import NumbaBackend


def create() -> NumbaBackend:
    """The backend."""
    return NumbaBackend()
