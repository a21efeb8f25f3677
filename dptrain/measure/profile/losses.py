"""What each loss of efficiency costs, by experiment: steps that leave out one cause at a time.

The experiments are run in blocks, in a random order in every round of one launch, with the same
minibatches per rank. With T the mean time of a step:

    alone      rank 0 works, the others wait
    unsummed   all ranks work without sums and without waiting for each other
    one_number ranks sum one number instead of the gradients
    after      ranks sum the gradients when the backward pass has ended
    during     the job: ranks sum during the backward pass if their method can

If the job sums batch statistics, the first three do not, and another experiment shows their cost:

    statistics_sums  one_number, with the sums of batch statistics of the job

Then T(during) = T(alone) + contention + load imbalance + serialisation + latency + batch
statistics + sums − saved by overlap, where

    contention     = mean over ranks of T(unsummed) − T(alone)
    load imbalance = largest T(unsummed) of any rank − mean over ranks of T(unsummed)
    serialisation  = T(one_number) − latency − largest T(unsummed) of any rank
    latency        = time of the sum of one number if all ranks start together
    batch statistics = T(statistics_sums) − T(one_number)
    sums           = T(after) − T(statistics_sums), or T(one_number) without batch statistics
    saved          = T(after) − T(during)

The largest T(unsummed) of any rank is that of `slowest_rank`, as in `dptrain.measure.profile.pop`.

Two more experiments inject a delay into the job: into one rank, and into the ranks in turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.measure.profile.analysis import Measured
from dptrain.measure.profile.known import KnownLoss, Recovery, judge
from dptrain.measure.profile.known_tables import why_withheld
from dptrain.measure.profile.pop import Pop, pop_efficiencies
from dptrain.measure.statistics import Estimate, slowest_rank
from dptrain.measure.step_record import STEP
from dptrain.measure.student import student, student_quantile
from dptrain.records import Form, StoredRecord

ALONE, UNSUMMED, ONE_NUMBER = "alone", "unsummed", "one_number"
AFTER, DURING = "after", "during"
DELAYED_RANK, DELAYED_IN_TURN = "delayed_rank", "delayed_in_turn"
EXPERIMENTS = (ALONE, UNSUMMED, ONE_NUMBER, AFTER, DURING, DELAYED_RANK, DELAYED_IN_TURN)
STATISTICS_SUMS, BATCH_STATISTICS = "statistics_sums", "batch statistics"
LATENCY = "latency"
SLOWEST = "slowest"
LOAD_IMBALANCE, LOAD_BALANCE = "load imbalance", "load_balance"
SAVED = "saved by overlap"
INSTRUCTIONS, CYCLES = "instructions", "cycles"


Times = Mapping[str, NDArray[np.float64]]
"""Mean times of a step in ms (rounds, ranks) by experiment, and `LATENCY`."""


@dataclass(frozen=True)
class Loss:
    """A part of the step that an experiment removes.

    Attributes:
        name: the cause.
        time_ms: difference of two experiments; negative for what is saved.
        share: the same divided by the step of the job.
    """

    name: str
    time_ms: Estimate
    share: float


@dataclass(frozen=True)
class Comparison:
    """An efficiency by experiment, and from the busy times of the ranks.

    Attributes:
        name: the efficiency.
        by_experiment: from the times of the experiments.
        by_busy_times: of the POP hierarchy, from the steps of the experiment `AFTER`.
        agree: True if the intervals overlap; None if there are too few steps for an interval.
    """

    name: str
    by_experiment: Estimate
    by_busy_times: Estimate
    agree: bool | None


@dataclass(frozen=True)
class Delay:
    """The effect of an injected delay.

    Attributes:
        name: `DELAYED_RANK` or `DELAYED_IN_TURN`.
        delay_ms: the delay in each step.
        waiting_ms: increase of the waiting of the other ranks per step.
        cost_ms: increase of the step.
        load_balance, serialisation: of the POP hierarchy with the delay.
    """

    name: str
    delay_ms: float
    waiting_ms: Estimate
    cost_ms: Estimate
    load_balance: Estimate
    serialisation: Estimate


@dataclass(frozen=True)
class Losses(StoredRecord):
    """What each loss of a job costs.

    Attributes:
        job: as in `Profile`.
        rounds, steps: number of rounds, and of timed steps of a block.
        step_ms: mean step by experiment; of `UNSUMMED`, mean over ranks.
        losses: differences; with the step of rank 0 alone they add up to the step of the job.
        computation_scaling: step of rank 0 alone / mean step of `UNSUMMED`.
        computation_factors: its factors instructions, instructions per cycle, and frequency; empty
            if hardware counters cannot be read.
        counters_missing: the reason if they cannot be read, else "".
        efficiencies: the parallel efficiency and its factors.
        delays: effects of injected delays.
        overlaps: True if the method of summing overlaps with the backward pass.
        environment: the same values as in ``env.json``.
        known: losses that were injected after the experiments; empty if none were.
        other_cores: mean number of cores that other programs used on the node of rank 0; None if it
            is unknown.
    """

    FORM = Form(
        noun="file of losses",
        otherwise="expected a file that `dptrain profile --losses --output` writes",
        anew="measure the losses again",
    )

    job: dict[str, Any]
    rounds: int
    steps: int
    step_ms: dict[str, Estimate]
    losses: tuple[Loss, ...]
    computation_scaling: Estimate
    computation_factors: dict[str, Estimate]
    counters_missing: str
    efficiencies: tuple[Comparison, ...]
    delays: tuple[Delay, ...]
    overlaps: bool
    environment: dict[str, Any]
    known: tuple[KnownLoss, ...] = ()
    other_cores: float | None = None

    @property
    def recoveries(self) -> tuple[Recovery, ...]:
        """How much of each known loss was recovered; empty if none was injected."""
        return judge(self.known)

    @property
    def withheld(self) -> str:
        """Why the losses are not shown; "" if no known loss was missed."""
        return why_withheld(self.recoveries, self.other_cores, self.environment.get("cores"))


def over_rounds(function: Callable[[Times], float], times: Times) -> Estimate:
    """Return a function of the means over rounds, with its 95% interval.

    The interval is that of the jackknife that leaves out one round at a time. The blocks of a round
    follow each other closely, so what differs between rounds has little effect on differences of
    experiments. Source: Efron and Tibshirani, "An introduction to the bootstrap", 1993, chapter 11.

    Args:
        function: of the means (1, ranks) by experiment.
        times: of at least two rounds.
    """
    rounds = len(next(iter(times.values())))
    value, error = _jackknife(function, times, rounds)
    half = student(rounds - 1) * error
    return Estimate(value, value - half, value + half, rounds)


def _jackknife(
    function: Callable[[Times], float], times: Times, rounds: int
) -> tuple[float, float]:
    """Return a function of the means over rounds, and its standard error."""
    sums = {name: rows.sum(axis=0) for name, rows in times.items()}
    value = function({name: total / rounds for name, total in sums.items()})
    without = np.array(
        [
            function({name: (sums[name] - rows[i]) / (rounds - 1) for name, rows in times.items()})
            for i in range(rounds)
        ]
    )
    pseudo = rounds * value - (rounds - 1) * without
    return value, float(pseudo.std(ddof=1)) / rounds**0.5


def possibly_slowest(unsummed: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the ranks whose difference from the slowest mean is within its 95% interval.

    Args:
        unsummed: times (rounds, ranks).
    """
    rounds = len(unsummed)
    shortfalls = unsummed[:, [unsummed.mean(axis=0).argmax()]] - unsummed
    error = shortfalls.std(axis=0, ddof=1) / rounds**0.5
    return np.flatnonzero(shortfalls.mean(axis=0) <= student(rounds - 1) * error)


def over_rounds_with_slowest(
    function: Callable[[Times], float],
    times: Times,
    least: float = -math.inf,
    most: float = math.inf,
) -> Estimate:
    """Return a function of the means over rounds and of the time of the slowest rank.

    The value is that with the time of `slowest_rank`, which other rounds determine than those in
    which it is measured; on average this time is too small, if anything. The interval is that of a
    maximum over the k ranks that may be the slowest: no rank is slower than the slowest, so the
    lower limit of its time is the highest of their lower limits, each of which holds with a
    probability of 1 − 0.025 / k (Bonferroni); the upper limit is the highest of their upper limits.

    In simulations with 2 to 64 ranks (equal, some slower, or all different) and ten rounds without
    slow changes, the intervals of load imbalance, load balance and both kinds of serialisation
    contain the truth in 94 to 99.7% of cases with up to 16 ranks, and in 91 to 100% with 64.

    Source: Chernozhukov, Lee and Rosen, "Intersection bounds: estimation and inference",
    Econometrica 81 (2013).

    Args:
        function: of the means (1, ranks) by experiment and of `SLOWEST`; monotonic in `SLOWEST`.
        times: of at least two rounds.
        least, most: bounds of the function.
    """
    unsummed = times[UNSUMMED]
    found = slowest_rank(unsummed.T, len(unsummed))[:, None]
    estimate = over_rounds(function, {**times, SLOWEST: found})
    rise = over_rounds(function, {**times, SLOWEST: found * 1.01}).value - estimate.value
    if rise:
        estimate = _of_slowest(function, times, estimate.value, rises=rise > 0)
    value, low, high = np.clip([estimate.value, estimate.low, estimate.high], least, most)
    return Estimate(float(value), float(low), float(high), estimate.n)


def _of_slowest(
    function: Callable[[Times], float], times: Times, value: float, *, rises: bool
) -> Estimate:
    """Return `value` with the interval of a function of the time of the slowest rank.

    Args:
        function, times: as in `over_rounds_with_slowest`.
        value: of the function.
        rises: True if the function is larger the slower that rank is.
    """
    unsummed = times[UNSUMMED]
    rounds, ranks = len(unsummed), possibly_slowest(unsummed).tolist()
    of_ranks = [
        _jackknife(function, {**times, SLOWEST: unsummed[:, [rank]]}, rounds) for rank in ranks
    ]
    one = student(rounds - 1)
    all_ranks = student_quantile(rounds - 1, 1 - 0.025 / len(ranks))
    if rises:
        low = max(found - all_ranks * error for found, error in of_ranks)
        high = max(found + one * error for found, error in of_ranks)
    else:
        low = min(found - one * error for found, error in of_ranks)
        high = min(found + all_ranks * error for found, error in of_ranks)
    return Estimate(value, min(low, value), max(high, value), rounds)


_LOSSES: dict[str, Callable[[Times], float]] = {
    "contention": lambda t: float(t[UNSUMMED].mean() - t[ALONE][0]),
    LOAD_IMBALANCE: lambda t: float(t[SLOWEST].mean() - t[UNSUMMED].mean()),
    "serialisation": lambda t: float(t[ONE_NUMBER].mean() - t[LATENCY].mean() - t[SLOWEST].mean()),
    "latency": lambda t: float(t[LATENCY].mean()),
    BATCH_STATISTICS: lambda t: float(t[STATISTICS_SUMS].mean() - t[ONE_NUMBER].mean()),
    "sums": lambda t: float(t[AFTER].mean() - t.get(STATISTICS_SUMS, t[ONE_NUMBER]).mean()),
    SAVED: lambda t: float(t[DURING].mean() - t[AFTER].mean()),
}
"""Losses in the order in which they are added to the step of rank 0 alone. `BATCH_STATISTICS` is
left out if the job does not sum them."""

_FACTORS: dict[str, Callable[[Times], float]] = {
    "parallel": lambda t: float(t[UNSUMMED].mean() / t[AFTER].mean()),
    LOAD_BALANCE: lambda t: float(t[UNSUMMED].mean() / t[SLOWEST].mean()),
    "serialisation": lambda t: float(
        t[SLOWEST].mean() / (t[ONE_NUMBER].mean() - t[LATENCY].mean())
    ),
    "transfer": lambda t: float((t[ONE_NUMBER].mean() - t[LATENCY].mean()) / t[AFTER].mean()),
}
"""Efficiencies by experiment, by the name of the efficiency in `Pop`."""


def find_losses(times: Times) -> tuple[Loss, ...]:
    """Return the differences between the experiments."""
    step = float(times[DURING].mean())
    found = []
    for name, function in _LOSSES.items():
        if name == BATCH_STATISTICS and STATISTICS_SUMS not in times:
            continue
        least = 0.0 if name == LOAD_IMBALANCE else -math.inf
        estimate = over_rounds_with_slowest(function, times, least=least)
        found.append(Loss(name, estimate, estimate.value / step))
    return tuple(found)


def mean_steps(times: Times) -> dict[str, Estimate]:
    """Return the mean step of each experiment; of `ALONE`, that of rank 0."""

    def mean_of(name: str) -> Callable[[Times], float]:
        return lambda t: float(t[name][0] if name == ALONE else t[name].mean())

    names = [name for name in (*EXPERIMENTS, STATISTICS_SUMS) if name in times]
    return {name: over_rounds(mean_of(name), times) for name in names}


def computation_scaling(times: Times) -> Estimate:
    """Return the step of rank 0 alone divided by the mean step of all ranks without sums."""
    return over_rounds(lambda t: float(t[ALONE][0] / t[UNSUMMED].mean()), times)


def computation_factors(times: Times) -> dict[str, Estimate]:
    """Return the factors of the computation scaling.

    Args:
        times: of the experiments, with `INSTRUCTIONS` and `CYCLES` of `ALONE` and `UNSUMMED`, per
            step.
    """

    def of(what: str, name: str, t: Times) -> float:
        key = f"{what} {name}" if what else name
        return float(t[key][0] if name == ALONE else t[key].mean())

    def ratio(top: str, bottom: str) -> Callable[[Times], float]:
        def scaling(t: Times) -> float:
            by_name = [of(top, name, t) / of(bottom, name, t) for name in (UNSUMMED, ALONE)]
            return by_name[0] / by_name[1]

        return scaling

    return {
        "instructions": over_rounds(
            lambda t: of(INSTRUCTIONS, ALONE, t) / of(INSTRUCTIONS, UNSUMMED, t), times
        ),
        "instructions_per_cycle": over_rounds(ratio(INSTRUCTIONS, CYCLES), times),
        "frequency": over_rounds(ratio(CYCLES, ""), times),
    }


def compare_efficiencies(times: Times, after: Measured) -> tuple[Comparison, ...]:
    """Return the efficiencies by experiment next to those of the busy times.

    Args:
        times: of the experiments.
        after: the steps of the experiment `AFTER`.
    """
    pop = efficiencies_of(after)
    found = []
    for name, function in _FACTORS.items():
        most = 1.0 if name == LOAD_BALANCE else math.inf
        by_experiment = over_rounds_with_slowest(function, times, least=0.0, most=most)
        by_busy_times = getattr(pop, name)
        known = math.isfinite(by_busy_times.high)
        agree = by_experiment.meets(by_busy_times) if known else None
        found.append(Comparison(name, by_experiment, by_busy_times, agree))
    return tuple(found)


def efficiencies_of(measured: Measured) -> Pop:
    """Return the efficiencies of the POP hierarchy of all steps, without layers."""
    return pop_efficiencies(measured.busy, measured.column(STEP).mean(axis=0), {})


def find_delay(name: str, delay_ms: float, times: Times, delayed: Measured, job: Measured) -> Delay:
    """Return the effect of an injected delay.

    Args:
        name: of the experiment.
        delay_ms: the delay.
        times: of the experiments.
        delayed, job: steps with the delay and of the job, the same number in each round.
    """
    rounds = len(times[name])

    def waiting(measured: Measured) -> NDArray[np.float64]:
        """Mean waiting (rounds, 1) of the ranks that are not delayed."""
        waited = measured.imbalance
        # In turn every rank is delayed in one of p steps; then all of p − 1 ranks wait.
        ranks = len(waited)
        if name == DELAYED_RANK:
            by_step = waited[:-1].mean(axis=0)
        else:
            by_step = waited.sum(axis=0) / (ranks - 1)
        rows: NDArray[np.float64] = by_step.reshape(rounds, -1).mean(axis=1, keepdims=True)
        return rows

    tables = {"with": waiting(delayed), "without": waiting(job)}
    pop = efficiencies_of(delayed)
    return Delay(
        name,
        delay_ms,
        over_rounds(lambda t: float(t["with"][0] - t["without"][0]), tables),
        over_rounds(lambda t: float(t[name].mean() - t[DURING].mean()), times),
        pop.load_balance,
        pop.serialisation,
    )
