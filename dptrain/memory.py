"""Report a lack of memory in one line that states the size needed and the size available."""

from __future__ import annotations

import math
import re

from dptrain.errors import UserError, shown
from dptrain.machine import free_memory

ADVICE = "use a smaller batch size, network or data set, or fewer ranks on this machine"

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def format_bytes(size_bytes: int) -> str:
    """Return a size with a binary unit.

    Example:
        >>> format_bytes(1000), format_bytes(3 * 2**29)
        ('1000 bytes', '1.5 GiB')
    """
    unit = max(min((max(size_bytes, 1).bit_length() - 1) // 10, len(_UNITS) - 1), 0)
    if unit == 0:
        return f"{size_bytes} bytes"
    # Whole numbers: the size of a float is limited, and a user may request any size.
    tenths = size_bytes * 10 // 2 ** (10 * unit)
    return f"{tenths // 10:,}.{tenths % 10} {_UNITS[unit]}"


def require_memory(
    size_bytes: int, purpose: str, advice: str = ADVICE, *, available_bytes: int | None = None
) -> None:
    """Refuse an allocation that cannot fit, before it is made.

    Linux grants more memory than it has and kills the process when the memory is used, so a
    `MemoryError` alone is not enough.

    Args:
        size_bytes: memory that will be allocated.
        purpose: what needs it, such as ``"a minibatch of 4096 samples"``.
        advice: what the user can change.
        available_bytes: memory that is free; by default that of this machine. Pass the free
            memory of a GPU if the allocation is made there.

    Raises:
        UserError: more memory is needed than is available.
    """
    if available_bytes is None:
        available_bytes = free_memory()
    if size_bytes > available_bytes:
        raise UserError(
            f"{purpose} needs {format_bytes(size_bytes)} of memory, but "
            f"{format_bytes(available_bytes)} are available; {advice}"
        )


def memory_user_error(error: MemoryError) -> UserError:
    """Return an error of one line with the size that could not be allocated and what is free."""
    size_bytes = _requested_bytes(error)
    needed = "" if size_bytes is None else f" for an array of {format_bytes(size_bytes)}"
    detail = f" ({shown(error, 120)})" if size_bytes is None and str(error) else ""
    return UserError(
        f"there is not enough memory{needed}{detail}; "
        f"{format_bytes(free_memory())} are available on this machine; {ADVICE}"
    )


def _requested_bytes(error: MemoryError) -> int | None:
    """Return the size of the allocation that failed, if the error of NumPy or CuPy states it."""
    shape, dtype = getattr(error, "shape", None), getattr(error, "dtype", None)
    item_bytes = getattr(dtype, "itemsize", None)
    if isinstance(shape, tuple) and isinstance(item_bytes, int):
        return math.prod(shape) * item_bytes
    match = re.search(r"allocating ([\d,]+) bytes", str(error))
    return int(match[1].replace(",", "")) if match else None
