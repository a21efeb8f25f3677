"""CPU time that other programs use on this machine during a measurement."""

from __future__ import annotations

import os
import resource
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dptrain.comm.world import World

STAT = Path("/proc/stat")
BUSY_SHARE = 0.1
"""Share of the machine's cores: a study reports other programs that use more."""


@dataclass(frozen=True)
class Clock:
    """A point in time with the CPU time used so far.

    Attributes:
        at_s: time in seconds.
        all_s: CPU time of all programs in seconds.
        ours_s: CPU time of this process and of its children, in seconds.
    """

    at_s: float
    all_s: float
    ours_s: float

    @classmethod
    def now(cls, stat: Path = STAT) -> Clock | None:
        """Return the present point in time; None if the system does not report CPU time."""
        try:
            fields = [int(field) for field in stat.read_text().split("\n", 1)[0].split()[1:]]
        except (OSError, ValueError):
            return None
        if len(fields) < 8:
            return None
        # proc(5): user nice system idle iowait irq softirq steal. Stolen time counts as used,
        # because a hypervisor assigned it to others.
        ticks = sum(fields[:3]) + sum(fields[5:8])
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        ours = sum(usage.ru_utime + usage.ru_stime for usage in used)
        ticks_per_s = os.sysconf("SC_CLK_TCK")
        return cls(
            time.monotonic(), ticks / ticks_per_s, ours + _ticks_of_live_children() / ticks_per_s
        )

    def others_since(self, before: Clock) -> float:
        """Return the mean number of cores that other programs used since `before`."""
        seconds = max(self.at_s - before.at_s, 1e-3)
        others = (self.all_s - before.all_s) - (self.ours_s - before.ours_s)
        return max(others / seconds, 0.0)


def _ticks_of_live_children() -> int:
    """Return the CPU time of children that have not ended, such as worker processes."""
    total = 0
    for path in Path("/proc/self/task").glob("*/children"):
        # A thread or a child may end meanwhile.
        with suppress(OSError):
            for child in path.read_text().split():
                with suppress(OSError):
                    total += _ticks_of(Path("/proc", child, "stat").read_text())
    return total


def _ticks_of(stat: str) -> int:
    """Return the CPU time of a process and of its children that have ended, from its proc file."""
    # proc(5): the name of the program, in parentheses, may contain spaces. After it, fields 12 to
    # 15 are utime stime cutime cstime, counted from 1.
    fields = stat.rpartition(")")[2].split()
    return sum(int(field) for field in fields[11:15])


def cores_of_others(before: Clock | None) -> float | None:
    """Return the mean number of cores that other programs used; None if it is unknown."""
    after = Clock.now()
    return None if before is None or after is None else after.others_since(before)


def load_line(cores: float | None, during: str) -> list[str]:
    """Return a line that states the load of other programs if they disturb a measurement.

    Args:
        cores: that they used; None if it is unknown.
        during: what was measured.

    Example:
        >>> load_line(None, "these steps")
        []
    """
    if cores is None or not is_busy(cores):
        return []
    return [
        f"other programs used {cores:.1f} cores of this node during {during}: an idle "
        "machine would be faster, and these times scatter"
    ]


def is_busy(cores: float | None, *, of: int | None = None) -> bool:
    """Return True if other programs use enough cores to disturb a measurement.

    Args:
        cores: mean number of cores that they use; None if it is unknown.
        of: number of cores of the machine; None for this one.
    """
    return cores is not None and cores > BUSY_SHARE * (of or os.cpu_count() or 1)


def cores_of_other_jobs(world: World, before: Clock | None) -> float | None:
    """Return the mean number of cores that other programs than this job used on this node.

    Every rank calls this function.

    Args:
        world: the ranks.
        before: point in time on this rank; None if it is unknown.

    Returns:
        None if it is unknown on a rank of the node.
    """
    after = Clock.now()
    known = before is not None and after is not None
    own = after.ours_s - before.ours_s if before is not None and after is not None else 0.0
    used = world.node_all_gather_json([known, own])
    if before is None or after is None or not all(found for found, _ in used):
        return None
    of_ranks = sum(seconds for _, seconds in used)
    return replace(after, ours_s=before.ours_s + of_ranks).others_since(before)
