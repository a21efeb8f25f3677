"""Sizes of this processor's caches.

Kernels use them to choose how many rows of a map are in scratch at the same time, which does not
change any result. Blocks that change the order of a sum have fixed sizes instead, because the same
network has the same results on every node.
"""

from __future__ import annotations

import functools
from pathlib import Path

DEFAULTS = {1: 32 * 1024, 2: 1024 * 1024, 3: 16 * 1024 * 1024}
"""Bytes of the data cache of each level if the system does not report them."""

_UNITS = {"K": 1024, "M": 1024**2, "G": 1024**3}


@functools.cache
def cache_bytes(level: int, folder: str = "/sys/devices/system/cpu/cpu0/cache") -> int:
    """Return the size of the data cache of a level, as Linux reports it for the first core.

    Args:
        level: 1, 2 or 3.
        folder: the system's description of the caches.
    """
    for index in sorted(Path(folder).glob("index*")):
        try:
            kind = (index / "type").read_text().strip()
            found = int((index / "level").read_text())
            size = (index / "size").read_text().strip()
        except (OSError, ValueError):
            continue
        if found == level and kind in ("Data", "Unified") and size[:-1].isdigit():
            return int(size[:-1]) * _UNITS.get(size[-1], 1)
    return DEFAULTS[level]
