"""Backends by name. The list is what lies in this folder; each is imported when asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from dptrain.errors import UserError, suggest

if TYPE_CHECKING:
    from dptrain.backends.base import Backend

BACKENDS = ("numba", "reference", "cuda", "cudnn")
"""Names users may say, the default first."""


def load_backend(name: str) -> Backend:
    """Import and return the backend called `name`."""
    if name not in BACKENDS:
        raise UserError(
            f"no backend '{name}'; there are {', '.join(BACKENDS)}{suggest(name, BACKENDS)}"
        )
    module = importlib.import_module(f"dptrain.backends.{name}")
    backend: Backend = module.create()
    return backend
