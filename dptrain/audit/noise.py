"""Simulated noise of steps and of launches: correlation, bursts, lateness, launches.

Times are in units of a step without noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]
Random = np.random.Generator

BURST_SPREAD = 0.3
"""Standard deviation of the logarithm of a step in a burst."""


@dataclass(frozen=True)
class Noise:
    """What makes steps and launches differ.

    Attributes:
        spread: standard deviation of the logarithm of a step.
        correlation: of these logarithms of neighbouring steps.
        burst_share, burst_steps, burst_factor: share of the steps of a rank that are in bursts,
            mean length of a burst, and how many times as long as others these steps are.
        rare_share, rare_steps: share of the steps of a rank that are interrupted, and for how many
            steps' time.
        late: mean lateness of a rank in a step.
        tail: index of the Pareto distribution of the lateness; infinite if it is exponential.
        launch_spread: standard deviation of the logarithm of the mean step of a launch.
        launch_correlation: of these logarithms of launches that follow each other.
        slow_share, slow_factor: share of launches that are slower, and how many times.
        clock: resolution of the clock; 0 if it is exact.
    """

    spread: float = 0.05
    correlation: float = 0.0
    burst_share: float = 0.0
    burst_steps: float = 20.0
    burst_factor: float = 2.5
    rare_share: float = 0.0
    rare_steps: float = 5.0
    late: float = 0.0
    tail: float = math.inf
    launch_spread: float = 0.02
    launch_correlation: float = 0.0
    slow_share: float = 0.0
    slow_factor: float = 1.5
    clock: float = 0.0

    def of_base(self) -> Noise:
        """Return the noise of rank 0 alone, none of whose launches is slow."""
        return replace(self, slow_share=0.0)

    def machine(self, random: Random, series: int, steps: int) -> Times:
        """Return factors (series, steps) by which a rank is slower: spread and bursts."""
        shape = series, steps
        found = np.exp(self.spread * autoregressive(random, shape, self.correlation))
        if self.burst_share:
            slow = bursts(random, shape, self.burst_share, self.burst_steps)
            spread = np.exp(BURST_SPREAD * random.standard_normal(shape))
            found *= np.where(slow, self.burst_factor * spread, 1.0)
        return found

    def lateness(self, random: Random, shape: tuple[int, ...], ranks: int) -> Times:
        """Return the time by which the last of `ranks` ranks is later than a rank without noise."""
        found = np.zeros(shape)
        if self.late:
            # Of n independent values, the largest has the distribution function F to the power n.
            above = -np.expm1(np.log(random.random(shape)) / ranks)
            if math.isinf(self.tail):
                found = -self.late * np.log(above)
            else:
                found = self.late * (self.tail - 1) * (above ** (-1 / self.tail) - 1)
        if self.rare_share:
            rare = 1 - (1 - self.rare_share) ** ranks
            found = np.maximum(found, self.rare_steps * (random.random(shape) < rare))
        return found

    def ranks(self, random: Random, series: int, ranks: int, steps: int) -> Times:
        """Return the times (series, ranks, steps) in which ranks compute."""
        found = self.machine(random, series * ranks, steps)
        found += self.lateness(random, found.shape, 1)
        return found.reshape(series, ranks, steps)

    def job(self, random: Random, series: int, ranks: int, steps: int) -> Times:
        """Return the steps (series, steps) of a job that waits for its last rank.

        Bursts come to each rank, and the spread to all of them together.
        """
        if self.burst_share:
            found = self.machine(random, series * ranks, steps)
            found = found.reshape(series, ranks, steps).max(axis=1)
        else:
            found = self.machine(random, series, steps)
        return found + self.lateness(random, found.shape, ranks)

    def launches(self, random: Random, series: int, launches: int) -> Times:
        """Return factors (series, launches) by which launches are slower."""
        shape = series, launches
        spread = self.launch_spread * autoregressive(random, shape, self.launch_correlation)
        slow = random.random(shape) < self.slow_share
        return np.asarray(np.exp(spread) * np.where(slow, self.slow_factor, 1.0))

    def read(self, random: Random, times: Times) -> Times:
        """Return steps as the clock reads them: it rounds their ends down."""
        if not self.clock:
            return times
        ends = random.random((*times.shape[:-1], 1)) * self.clock + np.cumsum(times, axis=-1)
        return np.diff(self.clock * np.floor(ends / self.clock), axis=-1, prepend=0.0)


def autoregressive(random: Random, shape: tuple[int, int], rho: float) -> Times:
    """Return normal series (series, steps) of variance 1 with the correlation `rho`."""
    noise = random.standard_normal(shape)
    if not rho:
        return noise
    found = noise.T.copy()
    for step in range(1, shape[1]):
        found[step] = rho * found[step - 1] + math.sqrt(1 - rho**2) * found[step]
    return np.asarray(found.T)


def bursts(
    random: Random, shape: tuple[int, int], share: float, length: float
) -> NDArray[np.bool_]:
    """Return True (series, steps) in bursts, a share of all steps with this mean length."""
    chance = random.random(shape[::-1])
    found = np.empty(shape[::-1], bool)
    state = random.random(shape[0]) < share
    begins = min(share / (1 - share) / length, 1.0)
    for step in range(shape[1]):
        found[step] = state
        state = np.where(state, chance[step] >= 1 / length, chance[step] < begins)
    return np.asarray(found.T)


STEPS = {
    "independent": Noise(),
    "AR 0.5": Noise(correlation=0.5),
    "AR 0.8": Noise(correlation=0.8),
    "AR 0.95": Noise(correlation=0.95),
    "bursts": Noise(burst_share=0.1),
    "long bursts": Noise(burst_share=0.3, burst_steps=60.0),
    "outliers": Noise(burst_share=0.02, burst_steps=1.0, burst_factor=4.0),
    "two groups of steps": Noise(burst_share=0.4, burst_steps=1.0, burst_factor=1.3),
    "rare interruptions": Noise(rare_share=0.001),
    "exponential lateness": Noise(late=0.05),
    "Pareto(3) lateness": Noise(late=0.05, tail=3.0),
    "Pareto(1.5) lateness": Noise(late=0.05, tail=1.5),
}
"""Noise of steps by its name."""

LAUNCHES = {
    "slow launches": Noise(slow_share=0.1),
    "two groups of launches": Noise(slow_share=0.5, slow_factor=1.3),
    "correlated launches": Noise(launch_correlation=0.8),
}
"""Noise of launches by its name."""

CLOCK = {"coarse clock": Noise(clock=1 / 2.3)}
"""A clock of 1 ms for a step of 2.3 ms."""

NOISES = {**STEPS, **LAUNCHES, **CLOCK}
