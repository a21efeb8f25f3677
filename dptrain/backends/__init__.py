"""Backends by name. Each is imported when it is selected."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from dptrain.errors import UserError, suggest

if TYPE_CHECKING:
    from dptrain.backends.base import Backend

BACKENDS = ("numba", "reference", "cuda", "cudnn", "null")
"""Names that users may pass, the default first: ``numba`` computes on the CPU, ``reference`` with
NumPy for tests, ``cuda`` on an NVIDIA GPU, ``cudnn`` there with convolutions by cuDNN, and ``null``
computes nothing and measures overhead. The package ``dptrain.backends.NAME`` has a function
``create``."""


def load_backend(name: str) -> Backend:
    """Import and return a backend.

    Args:
        name: one of `BACKENDS`.

    Raises:
        UserError: the name is unknown.
    """
    if name not in BACKENDS:
        raise UserError(
            f"there is no backend '{name}'; expected one of {', '.join(BACKENDS)}"
            f"{suggest(name, BACKENDS)}"
        )
    module = importlib.import_module(f"dptrain.backends.{name}")
    backend: Backend = module.create()
    return backend
