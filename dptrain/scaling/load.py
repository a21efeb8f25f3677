"""What other programs take of this machine's cores while we measure."""

from __future__ import annotations

import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path

STAT = Path("/proc/stat")
LOUD = 0.1
"""Share of the machine's cores, taken by others, from which a study says so."""


@dataclass(frozen=True)
class Clock:
    """A moment: seconds, and core seconds that all programs, and those that are ours, have used.

    Ours are this process and the children that have ended.
    """

    at_s: float
    all_s: float
    ours_s: float

    @classmethod
    def now(cls, stat: Path = STAT) -> Clock | None:
        """None where the system does not say."""
        try:
            fields = [int(word) for word in stat.read_text().split("\n", 1)[0].split()[1:]]
        except (OSError, ValueError):
            return None
        if len(fields) < 8:
            return None
        # proc(5): user nice system idle iowait irq softirq steal. What a hypervisor gives to
        # others, steal, is missing here too.
        ticks = sum(fields[:3]) + sum(fields[5:8])
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        ours = sum(usage.ru_utime + usage.ru_stime for usage in used)
        return cls(time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), ours)

    def others_since(self, before: Clock) -> float:
        """Cores that others kept busy, on average."""
        seconds = max(self.at_s - before.at_s, 1e-3)
        others = (self.all_s - before.all_s) - (self.ours_s - before.ours_s)
        return max(others / seconds, 0.0)


def cores_of_others(before: Clock | None) -> float | None:
    """Cores that others kept busy since `before`; None where the system does not say."""
    after = Clock.now()
    return None if before is None or after is None else after.others_since(before)


def is_loud(cores: float | None) -> bool:
    """Whether so many cores, taken by others, are worth a word."""
    return cores is not None and cores > LOUD * (os.cpu_count() or 1)
