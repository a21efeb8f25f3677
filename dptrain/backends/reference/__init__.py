"""The reference backend: plain NumPy without fusion; tests compare other backends with it."""

from dptrain.backends.reference.backend import ReferenceBackend


def create() -> ReferenceBackend:
    """Return the backend."""
    return ReferenceBackend()
