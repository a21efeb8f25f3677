"""Programs in worker processes, as `benchmarks.timing.measure` times them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from benchmarks.node.workers.processes import Team
from benchmarks.node.workers.running import Timed
from benchmarks.timing import Lap

GAP_S = 0.02
"""Pause before a program runs: threads of the previous one may still spin."""


@dataclass(frozen=True)
class Entry:
    """A program that is built in a team.

    Attributes:
        team, key: where it is built.
        peer_of, steps: see `benchmarks.timing.Program`.
        period_ns: see `running.run_steps`.
        facts: of its row.
    """

    team: Team
    key: str
    peer_of: str = ""
    period_ns: int = 0
    steps: int = 0
    facts: Mapping[str, Any] = field(default_factory=dict)

    def run(self, steps: int) -> Lap:
        """Run steps in every process of the team; several steps follow one that is not timed."""
        time.sleep(GAP_S)
        timed = self.team.run(self.key, steps, int(steps > 1), self.period_ns)
        lap = combine(timed, shares_steps=self.team.shares_steps)
        return lap if self.facts.get("threads") == 1 else replace(lap, cpu=None)


def combine(timed: Sequence[Timed], *, shares_steps: bool) -> Lap:
    """Return the times of a step over the processes of a team.

    A step that processes share begins when the last of them begins it, and ends when the last of
    them ends it. The CPU time is that of a single process.
    """
    begins = np.array([t.begins for t in timed])
    ends = np.array([t.ends for t in timed])
    spans, steps = ends[:, -1] - begins[:, 0], begins.shape[1]
    if shares_steps:
        median = np.median(ends.max(axis=0) - begins.max(axis=0))
        wall = (ends.max() - begins.min()) / steps
    else:
        median = np.median(ends - begins)
        wall = 1.0 / np.mean(steps / spans)
    cpu = float(np.median(timed[0].cpus)) / 1e6 if len(timed) == 1 else None
    return Lap(float(median) / 1e6, float(wall) / 1e6, cpu)
