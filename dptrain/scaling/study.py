"""What a scaling study says: points with their launches, efficiencies, fits and a forecast.

Records of plain numbers, written to ``study.json``; docs/measuring.md defines every figure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dptrain.measure.profile import Parts
from dptrain.scaling.statistics import Estimate

WEAK, STRONG = "weak", "strong"


@dataclass(frozen=True)
class Launch:
    """One launch of one point, from its ``profile.json``.

    Attributes:
        folder: below the study's.
        order: place among all launches of the study, in time.
        step_ms: median over its steps of the slowest rank's time.
        parts: of its mean step.
        hidden_ms: communication behind computing, mean of the ranks.
    """

    folder: str
    order: int
    started: str
    step_ms: float
    parts: Parts
    hidden_ms: float


@dataclass(frozen=True)
class Point:
    """A way of scaling at one number of ranks and threads.

    Attributes:
        scaling: `WEAK` or `STRONG`.
        batch_size: of all ranks.
        step_ms: median over launches, with its 95% bootstrap interval.
        speed_up: of images a second over the smallest number of workers; efficiency is that by the
            ratio of workers (ranks × threads).
        karp_flatt: experimentally determined serial fraction; None at one worker, and for weak
            scaling.
        loss: where the lost part of a step goes: milliseconds over the base point's by part of
            `Parts`; compute counts what exceeds ideal compute.
        possible: most efficiency that the cores allow.
        outliers: orders of launches beyond 3 median absolute deviations.
    """

    scaling: str
    ranks: int
    threads: int
    nodes: int
    batch_size: int
    local_batch: int
    launches: tuple[Launch, ...]
    step_ms: Estimate
    images_per_s: Estimate
    speed_up: Estimate
    efficiency: Estimate
    karp_flatt: Estimate | None
    parts: Parts
    loss: Parts
    hidden_ms: float
    possible: float
    outliers: tuple[int, ...]


@dataclass(frozen=True)
class Fit:
    """A model of the step time, fitted without the largest point and judged by it.

    Attributes:
        model: ``amdahl``, ``gustafson``, ``usl``, ``alpha-beta``.
        scaling: the points that it describes.
        parameters: by name, with units in the names; fitted to all points.
        equation: as people write it.
        hindcast_error: |predicted − measured| / measured of the largest point, fitted without it;
            None with too few points.
        curve: (ranks, step_ms) to draw.
    """

    model: str
    scaling: str
    parameters: dict[str, float]
    equation: str
    hindcast_error: float | None
    curve: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Forecast:
    """Step times at more ranks by the best fit; withheld where its hindcast error is above 15%.

    Attributes:
        withheld: why there is none; "" where there is one.
        assumptions: in sentences.
        points: (ranks, step_ms, efficiency).
    """

    scaling: str
    model: str
    hindcast_error: float | None
    withheld: str
    assumptions: tuple[str, ...]
    points: tuple[tuple[int, float, float], ...]


@dataclass(frozen=True)
class Study:
    """All of a scaling study.

    Attributes:
        job: what all points share, as `dptrain.measure.profile.Profile.job` has it.
        base_ranks, base_threads: what speed-ups are relative to.
        answer: the conclusion in sentences: how far it scales, and what limits it.
        profiles: folder of one launch of each point, whose ``profile.json`` has its layers.
        commands: of each point, as it can be typed.
        environment: of the first launch.
    """

    job: dict[str, Any]
    base_ranks: int
    base_threads: int
    points: tuple[Point, ...]
    fits: tuple[Fit, ...]
    forecasts: tuple[Forecast, ...]
    answer: tuple[str, ...]
    profiles: dict[str, str]
    commands: dict[str, str]
    environment: dict[str, Any]
