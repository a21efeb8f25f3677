"""Facts about the processor that change how fast a run computes, and that the system may change.

Sources: Linux, Documentation/admin-guide/pm/cpufreq.rst and intel_pstate.rst, and
Documentation/admin-guide/cputopology.rst.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dptrain.machine import own_cores

SYSTEM = Path("/sys/devices/system")


def cpu_configuration(
    system: Path = SYSTEM, allowed: Iterable[int] | None = None
) -> dict[str, Any]:
    """Return governor, turbo, hardware threads, NUMA nodes, topology and binding.

    A value is None if the system does not state it, as in many virtual machines.

    Args:
        system: folder of the description of the system; tests pass another folder.
        allowed: hardware threads that this process may use; by default its affinity mask.

    Returns:
        ``governor`` (one name, or several with commas), ``turbo`` and ``smt`` (True if active),
        ``threads_per_core``, ``sockets``, ``numa_nodes``, and ``binding``, the hardware threads
        that this process may use, such as ``0-3,8``.
    """
    cpus = sorted(own_cores() if allowed is None else allowed)
    folders = [system / "cpu" / f"cpu{number}" for number in cpus]
    governors = {text for f in folders if (text := _text(f / "cpufreq/scaling_governor"))}
    sockets = {text for f in folders if (text := _text(f / "topology/physical_package_id"))}
    siblings = [_text(f / "topology/thread_siblings_list") for f in folders]
    return {
        "governor": ",".join(sorted(governors)) or None,
        "turbo": _turbo(system / "cpu"),
        "smt": _flag(system / "cpu/smt/active"),
        "threads_per_core": max((_count(text) for text in siblings), default=0) or None,
        "sockets": len(sockets) or None,
        "numa_nodes": len(list((system / "node").glob("node[0-9]*"))) or None,
        "binding": _ranges(cpus),
    }


def _turbo(cpu: Path) -> bool | None:
    """Return whether the processor may raise its frequency above the nominal one."""
    disabled = _flag(cpu / "intel_pstate/no_turbo")
    return _flag(cpu / "cpufreq/boost") if disabled is None else not disabled


def _flag(path: Path) -> bool | None:
    return {"0": False, "1": True}.get(_text(path))


def _count(ranges: str) -> int:
    """Return how many numbers a list such as ``0,64`` or ``0-1`` contains."""
    pairs = [part.split("-") for part in ranges.split(",") if part]
    return sum(int(pair[-1]) - int(pair[0]) + 1 for pair in pairs)


def _ranges(numbers: Iterable[int]) -> str:
    """Return a list such as ``0-3,8`` of sorted numbers."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(f"{a}-{b}" if a != b else str(a) for a, b in found)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
