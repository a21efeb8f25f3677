"""CPU kernels in Python, compiled by numba: float32, channels last, fused, on a thread pool."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dptrain.errors import UserError

if TYPE_CHECKING:
    from dptrain.backends.numba.backend import NumbaBackend


def create() -> NumbaBackend:
    """Return the backend.

    Raises:
        UserError: an environment variable of Numba has a value that Numba refuses.
    """
    try:
        from dptrain.backends.numba.backend import NumbaBackend
    except ValueError as error:  # Numba reads its variables when it is imported.
        raise UserError(
            f"Numba cannot be imported: {str(error).rstrip('.')}; correct or unset the environment "
            "variables whose names begin with NUMBA_"
        ) from error
    return NumbaBackend()
