"""Describe the machine, without host or folder names because results are published."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from dptrain.measure.machine.environment import environment

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")

M_MMAP_MAX, M_TRIM_THRESHOLD = -4, -1
"""Parameters of glibc's mallopt(3)."""


def keep_freed_memory() -> bool:
    """Make the C library keep freed memory, as PyTorch users do with jemalloc or tcmalloc.

    By default glibc returns large blocks to the system, which fills their pages with zeros when
    PyTorch allocates them again in the next step: `solar` at batch 128 took 1.6 times as long.
    dptrain allocates nothing in a step.

    Returns:
        True if the C library supports this.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    settings = ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1))
    return all(mallopt(parameter, value) == 1 for parameter, value in settings)


def about(**settings: Any) -> dict[str, Any]:
    """Return machine, versions and date, then the settings of the run."""
    from dptrain.backends.numba.vector import compiled_registers

    here = environment()
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="minutes"),
        "cpu": here["cpu"],
        "cores": here["cores"],
        "caches": caches(CACHES),
        "vectors": f"{32 * compiled_registers().width} bits",
        "memory": f"{here['memory_bytes'] / 2**30:.0f} GiB",
        # Without the build, which can contain a name.
        "os": f"{platform.system()} {platform.release().partition('-')[0]} {platform.machine()}",
        "python": here["python"],
        "versions": versions("numba", "numpy", "torch"),
        "load at the start": load(),
        **settings,
    }


def load() -> list[float]:
    """Return the mean numbers of processes that ran or waited for a core in 1, 5 and 15 minutes."""
    return [round(value, 2) for value in os.getloadavg()]


def versions(*names: str) -> dict[str, str]:
    """Return the versions of the packages that are installed."""
    found = {}
    for name in names:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def caches(folder: Path) -> list[str]:
    """Return the caches of a core, such as ``L2 2048K``; empty if they are not reported."""
    return [f"L{level} {size}" for level, size in _caches(folder)]


def _caches(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield level and size of each data cache."""
    for index in sorted(folder.glob("index*")):
        try:
            level, kind, size = (
                (index / name).read_text().strip() for name in ("level", "type", "size")
            )
        except OSError:
            continue
        if kind != "Instruction":
            yield level, size
