"""The oracle: plain NumPy, no fusion, canonical layouts; what other backends are checked with."""

from dptrain.backends.reference.backend import ReferenceBackend


def create() -> ReferenceBackend:
    """The backend."""
    return ReferenceBackend()
