"""What the figures were measured on. No names of hosts or folders: results are published."""

from __future__ import annotations

import importlib.metadata
import os
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from dptrain.measure.environment import environment

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


def about(**settings: Any) -> dict[str, Any]:
    """Machine, versions and date, followed by the run's own settings."""
    here = environment()
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="minutes"),
        "cpu": here["cpu"],
        "cores": here["cores"],
        "caches": caches(CACHES),
        "memory": f"{here['memory_bytes'] / 2**30:.0f} GiB",
        "os": here["os"],
        "python": here["python"],
        "versions": {
            name: importlib.metadata.version(name) for name in ("numba", "numpy", "torch")
        },
        "load at the start": [round(load, 2) for load in os.getloadavg()],
        **settings,
    }


def caches(folder: Path) -> list[str]:
    """Caches that one core sees, such as ``L2 2048K``; empty where the system does not say."""
    found = []
    for index in sorted(folder.glob("index*")):
        try:
            level, kind, size = (
                (index / name).read_text().strip() for name in ("level", "type", "size")
            )
        except OSError:
            continue
        if kind != "Instruction":
            found.append(f"L{level} {size}")
    return found
