"""CPU kernels in Python, compiled by numba: float32, channels last, fused, on a thread pool.

Raises:
    UserError: on import, if Numba refuses the value of one of its environment variables, or one of
        them disables its compiler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import dptrain.native  # noqa: F401  (It checks that Numba can compile.)

if TYPE_CHECKING:
    from dptrain.backends.numba.backend import NumbaBackend


def create() -> NumbaBackend:
    """Return the backend."""
    from dptrain.backends.numba.backend import NumbaBackend

    return NumbaBackend()
