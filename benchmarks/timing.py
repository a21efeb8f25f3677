"""Time programs against each other in alternating rounds.

Programs alternate round by round, so that disturbances of a shared machine affect all of them. A
speedup is the median, with quartiles, of the quotients of rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

MAX_STEPS = 200
"""Largest number of steps of a round."""

HOPELESS = 1.6
"""A peer that was slower than the fastest peer by this factor in the first round is excluded."""

Step = Callable[[], object]


@dataclass(frozen=True)
class Lap:
    """Times of a step in one round, in ms.

    Attributes:
        median: median over the steps, or the mean if they are not timed one by one.
        wall: wall time divided by steps. Of ranks: from the first start to the last end. Of
            copies: the inverse of the mean number of steps in a unit of time.
        cpu: median CPU time of a step; None if it is unknown or the program has several threads.
    """

    median: float
    wall: float
    cpu: float | None = None

    @property
    def undisturbed(self) -> float:
        """The time that other programs on a busy machine disturb least."""
        return self.median if self.cpu is None else self.cpu


class Program(Protocol):
    """A program that runs steps.

    Attributes:
        peer_of: programs with the same text compete; the slow ones are excluded. Empty: never.
        steps: fixed number of steps of a round; 0 follows from the time of a step.
    """

    @property
    def peer_of(self) -> str: ...

    @property
    def steps(self) -> int: ...

    def run(self, steps: int) -> Lap:
        """Run steps and return the times of one."""
        ...


@dataclass(frozen=True)
class HostProgram:
    """A program of this process that computes in `step`.

    The clock is the CPU time of the process, over all its threads. On an idle machine it equals
    wall time; on a busy one it excludes the time in which other programs had the core.

    Attributes:
        step: makes a step.
        is_short: a step takes so few µs that reading the clock would count: the time is a mean of
            all steps of a round, not a median of single steps.
        peer_of, steps: see `Program`.
    """

    step: Step
    is_short: bool = False
    peer_of: str = ""
    steps: int = 0

    def run(self, steps: int) -> Lap:
        """Run steps and return the CPU and wall time of one."""
        repeats = steps if self.is_short else 1
        times = np.zeros((2, steps // repeats), np.int64)
        for number in range(steps // repeats):
            cpu, wall = time.process_time_ns(), time.perf_counter_ns()
            for _ in range(repeats):
                self.step()
            times[:, number] = time.process_time_ns() - cpu, time.perf_counter_ns() - wall
        cpu_ms, wall_ms = np.median(times, axis=1) / repeats / 1e6
        return Lap(float(cpu_ms), float(wall_ms), float(cpu_ms))


@dataclass(frozen=True)
class Ratio:
    """Median and quartiles of the quotients of rounds."""

    value: float
    low: float
    high: float

    def times(self, factor: float) -> Ratio:
        """Return the ratio multiplied by a factor."""
        return Ratio(factor * self.value, factor * self.low, factor * self.high)


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """Return the first and third quartile."""
    low, high = np.percentile(values, [25, 75])
    return float(low), float(high)


def quotient(numerator: Sequence[float], denominator: Sequence[float]) -> Ratio:
    """Return median and quartiles of the quotients of rounds.

    Rounds after those that both programs have are ignored.

    Example:
        >>> quotient([2.0, 6.0, 100.0], [1.0, 2.0])
        Ratio(value=2.5, low=2.25, high=2.75)
    """
    count = min(len(numerator), len(denominator))
    values = np.array(numerator[:count]) / np.array(denominator[:count])
    low, median, high = np.percentile(values, [25, 50, 75])
    return Ratio(float(median), float(low), float(high))


@dataclass(frozen=True)
class Series:
    """Times of a program in ms per step, one value for each round (see `Lap`).

    Attributes:
        medians, walls: of each round.
        steps: number of timed steps, all rounds together.
        cpus: CPU times of each round; empty if they are unknown.
    """

    medians: tuple[float, ...]
    walls: tuple[float, ...]
    steps: int
    cpus: tuple[float, ...] = ()

    @classmethod
    def of(cls, us: Sequence[float]) -> Series:
        """Return the series of times in µs that were measured elsewhere, one for each round."""
        ms = tuple(each / 1e3 for each in us)
        return cls(ms, ms, len(ms))

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
        found = {
            "median_ms": self.median,
            "quartiles_ms": quartiles(self.medians),
            "wall_ms": self.wall,
            "wall_quartiles_ms": quartiles(self.walls),
            "rounds": len(self.walls),
            "steps": self.steps,
            "medians_ms": list(self.medians),
            "walls_ms": list(self.walls),
        }
        return {**found, "cpus_ms": list(self.cpus)} if self.cpus else found


def measure(
    programs: Mapping[str, Program],
    *,
    rounds: int,
    block_s: float,
    limit: float | None = None,
    min_steps: int = 1,
    max_steps: int = MAX_STEPS,
) -> dict[str, Series]:
    """Time programs in alternating rounds.

    Args:
        programs: the programs by name.
        rounds: number of rounds.
        block_s: time of a program in a round.
        limit: reading of `time.monotonic` after which no further round starts; two are made anyway.
        min_steps, max_steps: bounds of the steps of a round.
    """
    steps = {}
    for name, program in programs.items():
        program.run(min_steps)
        estimate_s = max(program.run(min_steps).wall, 1e-6) / 1e3
        steps[name] = program.steps or int(np.clip(block_s / estimate_s, min_steps, max_steps))
    laps = {name: list[Lap]() for name in programs}
    active = dict(programs)
    for number in range(rounds):
        if limit is not None and number >= 2 and time.monotonic() > limit:
            break
        # Every second round goes backwards, so that no program always follows the same one.
        for name in list(active)[:: -1 if number % 2 else 1]:
            laps[name].append(active[name].run(steps[name]))
        if number == 0:
            active = _competitive(
                active, {name: found[0].undisturbed for name, found in laps.items()}
            )
    return {name: _series(found, steps[name] * len(found)) for name, found in laps.items()}


def _series(laps: Sequence[Lap], steps: int) -> Series:
    cpus = tuple(lap.cpu for lap in laps if lap.cpu is not None)
    return Series(tuple(lap.median for lap in laps), tuple(lap.wall for lap in laps), steps, cpus)


def _competitive(programs: dict[str, Program], times: Mapping[str, float]) -> dict[str, Program]:
    """Return the programs without peers that are much slower than the fastest of their peers."""
    fastest: dict[str, float] = {}
    for name, program in programs.items():
        fastest[program.peer_of] = min(times[name], fastest.get(program.peer_of, times[name]))
    return {
        name: program
        for name, program in programs.items()
        if not program.peer_of or times[name] <= HOPELESS * fastest[program.peer_of]
    }
