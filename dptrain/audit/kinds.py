"""Kinds of intervals: how each follows from simulated times, and the truth that it should have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial

import numpy as np

from dptrain.audit.noise import CLOCK, LAUNCHES, STEPS, Noise, Random, Times
from dptrain.measure.efficiency import Baseline, Pair, efficiency
from dptrain.measure.machine.energy import energy_of
from dptrain.measure.profile import losses
from dptrain.measure.profile.pop import Pop, pop_efficiencies
from dptrain.measure.statistics import Estimate, median_of_runs, median_of_steps
from dptrain.scaling.efficiencies import pop_over_launches
from dptrain.scaling.pairing import Walls, compare_walls, mean_wall
from dptrain.training.baseline import MAX_BLOCKS, TOGETHER

STEP_MS = 2.0
"""Time of a step without noise."""
TRANSFER = 0.1
"""Time of a gradient sum, in steps."""
ROUNDS = 10
"""Rounds of the losses by experiment."""
STEPS_OF_BLOCK, APART = 10, 60
"""Steps of a block of rank 0 alone, and steps between such blocks, in a training."""
LONG, SERIES = 400_000, 400
"""Number of steps, and of series into which they are divided, that determine the truth."""
WATTS = 100.0


@dataclass(frozen=True)
class Size:
    """What a measurement contains.

    Attributes:
        ranks: number of ranks.
        steps: steps of a launch, of a profile, or of all blocks of an experiment.
        launches: launches of each point of a study.
        base: noise of the base of an efficiency; None for that of rank 0 with the same noise.
    """

    ranks: int = 4
    steps: int = 400
    launches: int = 5
    base: Noise | None = None


@dataclass(frozen=True)
class Kind:
    """A kind of interval.

    Attributes:
        draw: simulates measurements and returns their estimates: noise, size, generator, number.
        truth: returns what the intervals should contain.
        noises: names of the noises that affect it.
        size: of a measurement with default settings.
        longer: by noise, the size from which on the interval holds, if it is larger.
    """

    draw: Callable[[Noise, Size, Random, int], Iterator[Estimate]]
    truth: Callable[[Noise, Size], float]
    noises: tuple[str, ...]
    size: Size = Size()
    longer: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


@lru_cache(64)
def long_run(noise: Noise, ranks: int, *, median: bool = False) -> float:
    """Return the mean or the median of many steps of a job in ms."""
    found = noise.job(np.random.default_rng(0), SERIES, ranks, LONG // SERIES)
    return STEP_MS * float(np.median(found) if median else found.mean())


def draw_medians(
    method: Callable[[Times], Estimate], noise: Noise, size: Size, random: Random, series: int
) -> Iterator[Estimate]:
    """Medians of the steps of one launch."""
    steps = noise.job(random, series, size.ranks, size.steps)
    yield from map(method, STEP_MS * noise.read(random, steps))


def median_truth(noise: Noise, size: Size) -> float:
    """Return the median step in the long run in ms."""
    return long_run(noise, size.ranks, median=True)


def draw_training(noise: Noise, size: Size, random: Random, series: int) -> Iterator[Estimate]:
    """Efficiencies of `dptrain train`: blocks of rank 0 alone and of the job take turns.

    Bursts come to the machine, and lateness to each rank.
    """
    steps, ranks = STEPS_OF_BLOCK, size.ranks
    together = steps * max(TOGETHER, ranks)
    length = together + steps + APART
    for _ in range(series):
        machine = noise.machine(random, 1, MAX_BLOCKS * length).reshape(MAX_BLOCKS, -1)
        job = machine[:, :together] + noise.lateness(random, (MAX_BLOCKS, together), ranks)
        alone = machine[:, together : together + steps]
        alone = alone + noise.lateness(random, alone.shape, 1)
        ns = 1e6 * STEP_MS
        pairs = tuple(
            Pair(ns * one, ns * one, ns * all_ranks)
            for one, all_ranks in zip(alone.mean(axis=1), job.mean(axis=1), strict=True)
        )
        found = efficiency(Baseline(pairs, alone.size, job.size), ranks, possible=1.0)
        if found.weak is not None:
            yield found.weak


def training_truth(noise: Noise, size: Size) -> float:
    """Return the efficiency of `draw_training` in the long run."""
    machine = replace(noise, late=0.0, rare_share=0.0)
    lateness = replace(noise, burst_share=0.0)
    without = long_run(replace(machine, burst_share=0.0), 1)
    alone, job = (long_run(lateness, ranks) - without for ranks in (1, size.ranks))
    step = long_run(machine, 1)
    return (step + alone) / (step + job)


def launch_walls(noise: Noise, size: Size, random: Random, series: int, ranks: int) -> Times:
    """Return the mean steps (series, launches) of launches in ms."""
    steps = noise.job(random, series * size.launches, ranks, size.steps).mean(axis=1)
    factors = noise.launches(random, series, size.launches)
    return np.asarray(STEP_MS * factors * steps.reshape(series, -1))


def draw_efficiencies(noise: Noise, size: Size, random: Random, series: int) -> Iterator[Estimate]:
    """Efficiencies of `dptrain scale`. The base has no slow launches, which is the harder case."""
    base = launch_walls(size.base or noise.of_base(), size, random, series, 1)
    point = launch_walls(noise, size, random, series, size.ranks)
    num_steps = size.steps * size.launches
    for one, two in zip(base, point, strict=True):
        yield compare_walls(Walls(one, num_steps), Walls(two, num_steps), paired=True)[0]


def efficiency_truth(noise: Noise, size: Size) -> float:
    """Return the efficiency of `draw_efficiencies` over many launches."""
    base = step_truth(size.base or noise.of_base(), replace(size, ranks=1))
    return base / step_truth(noise, size)


def draw_steps(noise: Noise, size: Size, random: Random, series: int) -> Iterator[Estimate]:
    """Mean steps of a point of `dptrain scale`."""
    for times in launch_walls(noise, size, random, series, size.ranks):
        yield mean_wall(Walls(times, size.steps * size.launches))[0]


def step_truth(noise: Noise, size: Size) -> float:
    """Return the mean step over many launches in ms."""
    slow = 1 + noise.slow_share * (noise.slow_factor - 1)
    return float(np.exp(noise.launch_spread**2 / 2)) * slow * long_run(noise, size.ranks)


def draw_pop_of(noise: Noise, size: Size, random: Random) -> tuple[Pop, float]:
    """Return the efficiencies of a launch, and its mean step in ms."""
    busy = STEP_MS * noise.ranks(random, 1, size.ranks, size.steps)[0]
    wall = busy.max(axis=0) + STEP_MS * TRANSFER
    return pop_efficiencies(busy, wall, {}), float(wall.mean())


def draw_pop(
    name: str, noise: Noise, size: Size, random: Random, series: int
) -> Iterator[Estimate]:
    """Efficiencies of the POP hierarchy of a profile."""
    for _ in range(series):
        yield getattr(draw_pop_of(noise, size, random)[0], name)


def draw_pop_of_studies(
    noise: Noise, size: Size, random: Random, series: int
) -> Iterator[Mapping[str, Estimate]]:
    """Efficiencies of the POP hierarchy of a point of a study, by name."""
    for factors in noise.launches(random, series, size.launches):
        found = [draw_pop_of(noise, size, random) for _ in factors]
        walls = np.array([wall for _, wall in found]) * factors
        num_steps = size.steps * size.launches
        yield pop_over_launches(Walls(walls, num_steps), [pop for pop, _ in found])


@lru_cache(64)
def pop_truths(noise: Noise, ranks: int) -> Mapping[str, float]:
    """Return the efficiencies of equal ranks, of which none is the slowest in the long run."""
    busy = noise.ranks(np.random.default_rng(0), SERIES // ranks or 1, ranks, LONG // SERIES)
    mean, slowest = float(busy.mean()), float(busy.max(axis=1).mean())
    wall = slowest + TRANSFER
    return {
        "parallel": mean / wall, "load_balance": 1.0, "serialisation": mean / slowest,
        "transfer": slowest / wall,
    }  # fmt: skip


def pop_truth(name: str, noise: Noise, size: Size) -> float:
    """Return one of `pop_truths`."""
    return pop_truths(noise, size.ranks)[name]


def draw_losses(noise: Noise, size: Size, random: Random, series: int) -> Iterator[Estimate]:
    """The load imbalance of equal ranks. Blocks of other experiments separate the rounds."""
    for _ in range(series):
        busy = noise.ranks(random, ROUNDS, size.ranks, size.steps // ROUNDS)
        times = {losses.UNSUMMED: STEP_MS * busy.mean(axis=2)}
        yield losses.over_rounds_with_slowest(_imbalance, times, least=0.0)


def _imbalance(t: losses.Times) -> float:
    return float(t[losses.SLOWEST].mean() - t[losses.UNSUMMED].mean())


def draw_energies(noise: Noise, size: Size, random: Random, series: int) -> Iterator[Estimate]:
    """Energies per step, which takes ten times `STEP_MS`, at constant power."""
    for steps in noise.job(random, series, size.ranks, size.steps):
        seconds = np.concatenate([[0.0], np.cumsum(STEP_MS / 100 * steps)])
        readings = [(s, WATTS * s, float(number)) for number, s in enumerate(seconds)]
        found = energy_of([{"names": ["processor"], "missing": [], "readings": readings}])
        if found.joules_per_sample is not None:
            yield found.joules_per_sample


def energy_truth(noise: Noise, size: Size) -> float:
    """Return the energy per step in the long run in joules."""
    return WATTS / 100 * long_run(noise, size.ranks)


POP = ("parallel", "load_balance", "serialisation", "transfer")
_LONG = {"long bursts": {"steps": 2000}}
_STUDY = Size(steps=50)

KINDS = {
    "median step": Kind(
        partial(draw_medians, median_of_steps), median_truth, (*STEPS, *CLOCK), longer=_LONG
    ),
    "median run of bench": Kind(
        partial(draw_medians, median_of_runs), median_truth, (*STEPS, *CLOCK), Size(ranks=1),
        longer=_LONG,
    ),
    "efficiency of train": Kind(draw_training, training_truth, tuple(STEPS)),
    "efficiency of scale": Kind(draw_efficiencies, efficiency_truth, (*STEPS, *LAUNCHES), _STUDY),
    "step of scale": Kind(draw_steps, step_truth, (*STEPS, *LAUNCHES), _STUDY),
    **{
        f"POP {name.replace('_', ' ')}": Kind(
            partial(draw_pop, name), partial(pop_truth, name), tuple(STEPS), longer=_LONG
        )
        for name in POP
    },
    "load imbalance by experiment": Kind(
        draw_losses, lambda noise, size: 0.0, tuple(STEPS), Size(steps=100)
    ),
    "energy": Kind(draw_energies, energy_truth, tuple(STEPS), longer=_LONG),
}  # fmt: skip
"""Kinds of intervals by name."""
