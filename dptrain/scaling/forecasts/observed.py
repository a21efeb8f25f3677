"""What a study measured, as forecasts use it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Figures:
    """Times of one launch in milliseconds.

    Attributes:
        step_ms: wall time / steps.
        busy_ms, transfer_ms, waiting_ms: parts of the mean step; busy is all but communication.
        sums_ms: gradient sums of a step, timed alone.
        sweep: bytes and time of an all-reduce alone; empty on one rank.
    """

    step_ms: float
    busy_ms: float
    transfer_ms: float
    waiting_ms: float
    sums_ms: float
    sweep: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Observed:
    """A point that was measured.

    Attributes:
        ranks, nodes: their numbers.
        batch_size, local_batch: samples of a step, of all ranks and of one.
        buckets: bytes of each gradient bucket, and number of such buckets.
        launches: in the order of rounds.
        library: name of the MPI library; "" if it is unknown.
        slots: number of ranks for which a node has a GPU, or cores; 0 if it is unknown.
        on_gpu: True if each rank computes on a GPU of its own.
    """

    ranks: int
    nodes: int
    batch_size: int
    local_batch: float
    buckets: tuple[tuple[int, int], ...]
    launches: tuple[Figures, ...]
    library: str = ""
    slots: int = 0
    on_gpu: bool = False

    @property
    def per_node(self) -> int:
        """Ranks of the fullest node."""
        return math.ceil(self.ranks / self.nodes)

    @property
    def step_ms(self) -> float:
        """Mean of wall time / steps over the launches."""
        return float(np.mean([found.step_ms for found in self.launches]))

    @property
    def noise(self) -> float:
        """Standard error of the logarithm of `step_ms`."""
        logs = np.log([found.step_ms for found in self.launches])
        return float(np.std(logs, ddof=1) / math.sqrt(len(logs)))


@dataclass(frozen=True)
class Means:
    """A point with the mean times of some launches, in milliseconds."""

    point: Observed
    step: float
    busy: float
    transfer: float
    waiting: float
    sums: float
    sweep: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, point: Observed, chosen: NDArray[np.int64]) -> Means:
        """Return the means over the chosen launches."""
        found = [point.launches[i % len(point.launches)] for i in chosen]
        times = [[f.busy_ms, f.transfer_ms, f.waiting_ms, f.sums_ms] for f in found]
        busy, transfer, waiting, sums = np.mean(times, axis=0).tolist()
        step = float(np.mean([f.step_ms for f in found]))
        sizes = [size for size, _ in found[0].sweep]
        laps = np.array([[ms for _, ms in f.sweep] for f in found]).reshape(len(found), -1)
        means = np.exp(np.mean(np.log(laps), axis=0)).tolist()
        sweep = tuple(zip(sizes, means, strict=True))
        return cls(point, step, busy, transfer, waiting, sums, sweep)
