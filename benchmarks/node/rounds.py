"""Measure programs in alternating rounds, and combine the rounds."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.node.workers.processes import Team
from benchmarks.node.workers.running import Timed
from benchmarks.timing import Ratio

MAX_STEPS = 200
GAP_S = 0.02
"""Pause before a program runs: threads of the previous one may still spin."""
HOPELESS = 1.6
"""A peer that was slower than the fastest peer by this factor in the first round is excluded."""


@dataclass(frozen=True)
class Entry:
    """A program that is built in a team.

    Attributes:
        team, key: where it is built.
        peer_of: programs with the same text compete; the slow ones are excluded. Empty: never.
        period_ns: see `running.run_steps`.
        steps: fixed number of steps of a round; 0 follows from the time of a step.
    """

    team: Team
    key: str
    peer_of: str = ""
    period_ns: int = 0
    steps: int = 0


@dataclass(frozen=True)
class Series:
    """Times of a program in ms per step, one value for each round.

    Attributes:
        medians: median of the steps.
        walls: wall time divided by steps. Of ranks: from the first start to the last end. Of
            copies: the inverse of the mean number of steps in a unit of time.
        steps: number of timed steps, all rounds together.
    """

    medians: tuple[float, ...]
    walls: tuple[float, ...]
    steps: int

    @property
    def median(self) -> float:
        """Median over the rounds of the medians."""
        return float(np.median(self.medians))

    @property
    def wall(self) -> float:
        """Median over the rounds of the wall time divided by steps."""
        return float(np.median(self.walls))

    def as_dict(self) -> dict[str, Any]:
        """Return medians, quartiles and rounds for JSON."""
        return {
            "median_ms": self.median,
            "quartiles_ms": quartiles(self.medians),
            "wall_ms": self.wall,
            "wall_quartiles_ms": quartiles(self.walls),
            "rounds": len(self.walls),
            "steps": self.steps,
        }


@dataclass
class _Record:
    medians: list[float] = field(default_factory=list)
    walls: list[float] = field(default_factory=list)
    steps: int = 0


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """Return the first and third quartile."""
    low, high = np.percentile(values, [25, 75])
    return float(low), float(high)


def quotient(numerator: Sequence[float], denominator: Sequence[float]) -> Ratio:
    """Return median and quartiles of the quotients of rounds.

    Rounds after those that both programs have are ignored.
    """
    count = min(len(numerator), len(denominator))
    values = np.array(numerator[:count]) / np.array(denominator[:count])
    low, median, high = np.percentile(values, [25, 50, 75])
    return Ratio(float(median), float(low), float(high))


def combine(timed: Sequence[Timed], *, shares_steps: bool) -> tuple[float, float]:
    """Return the median and the wall time of a step in ms, over the processes of a team.

    A step that processes share begins when the last of them begins it, and ends when the last of
    them ends it.
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
    return float(median) / 1e6, float(wall) / 1e6


def measure(
    entries: Mapping[str, Entry], *, rounds: int, block_s: float, limit: float | None = None
) -> dict[str, Series]:
    """Time programs in alternating rounds.

    Args:
        entries: the programs by name.
        rounds: number of rounds.
        block_s: time of a program in a round; at least one step is made.
        limit: reading of `time.monotonic` after which no further round starts; two are made anyway.
    """
    steps = {name: entry.steps or _num_steps(entry, block_s) for name, entry in entries.items()}
    records = {name: _Record() for name in entries}
    active = dict(entries)
    for number in range(rounds):
        if limit is not None and number >= 2 and time.monotonic() > limit:
            break
        # Every second round goes backwards, so that no program always follows the same one.
        for name in list(active)[:: -1 if number % 2 else 1]:
            entry = active[name]
            time.sleep(GAP_S)
            warm_up = 0 if steps[name] == 1 else 1
            timed = entry.team.run(entry.key, steps[name], warm_up, entry.period_ns)
            median, wall = combine(timed, shares_steps=entry.team.shares_steps)
            records[name].medians.append(median)
            records[name].walls.append(wall)
            records[name].steps += steps[name]
        if number == 0:
            active = _competitive(active, records)
    return {name: Series(tuple(r.medians), tuple(r.walls), r.steps) for name, r in records.items()}


def _num_steps(entry: Entry, block_s: float) -> int:
    """Return how many steps fill a block, from two steps that also warm up."""
    timed = entry.team.run(entry.key, 2, 0, entry.period_ns)
    shortest = max(min(t.steps_ns) for t in timed)
    return int(np.clip(block_s * 1e9 / max(shortest, 1), 1, MAX_STEPS))


def _competitive(entries: dict[str, Entry], records: Mapping[str, _Record]) -> dict[str, Entry]:
    """Return the entries without peers that are much slower than the fastest of their peers."""
    fastest: dict[str, float] = {}
    for name, entry in entries.items():
        time_ms = records[name].medians[0]
        fastest[entry.peer_of] = min(time_ms, fastest.get(entry.peer_of, time_ms))
    return {
        name: entry
        for name, entry in entries.items()
        if not entry.peer_of or records[name].medians[0] <= HOPELESS * fastest[entry.peer_of]
    }
