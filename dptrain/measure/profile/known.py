"""Known losses: how much of what was injected into a job the measurement recovers.

A table of losses is believed if it finds losses whose size is known. Three are injected, in rounds
in which a normal block of steps and one with each loss follow each other in a random order:

    delay      the slowest rank computes nothing for a given time in each step
    lost core  another thread keeps the core of the slowest rank busy; the kernel reports for how
               long the rank waited for it (run-queue delay)
    message    the ranks sum further bytes in each step, whose sum alone is timed in the same round

The recovered loss is the difference between the step of the block and that of the normal block. A
delay of one rank lengthens a step only by what exceeds the time that the rank would have waited for
others. With b the busy times of the ranks in the normal steps of the round, the slowest rank s and
the delays d of the steps, the injected loss is the mean of max(b + d at s) − max(b).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dptrain.measure.statistics import Estimate
from dptrain.measure.student import student_quantile

DELAY, LOST_CORE, MESSAGE = "delay", "lost core", "message"
INJECTED = (DELAY, LOST_CORE, MESSAGE)
WIDEST = 1 / 3
"""Largest half-width of the interval of a recovered loss, as a share of the injected one."""
TOLERANCE = 0.05
"""Share of the injected loss by which its own cost may differ from it: a thread that was kept
waiting finds its data in fewer caches. Differences below it change no conclusion."""
FEWEST_ROUNDS = 4
"""Smallest number of rounds of all launches together; fewer have no useful interval."""


@dataclass(frozen=True)
class KnownLoss:
    """A loss that was injected into one launch.

    Attributes:
        name: one of `INJECTED`.
        injected_ms, recovered_ms: the injected loss, and the increase of the step, by round; empty
            if it was not injected.
        reason: why it was not injected, else "".
    """

    name: str
    injected_ms: tuple[float, ...] = ()
    recovered_ms: tuple[float, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class Recovery:
    """What the measurement found of an injected loss.

    Attributes:
        name: one of `INJECTED`.
        injected_ms: mean over rounds; None if it was not injected.
        recovered_ms: mean over rounds, with its interval; None if there are too few rounds.
        is_recovered: True if the interval is not more than `TOLERANCE` of the injected loss away
            from it, and its half-width is at most `WIDEST` of it; None if that is not known.
        reason: why it is not recovered, or not known, else "".
    """

    name: str
    injected_ms: float | None
    recovered_ms: Estimate | None
    is_recovered: bool | None
    reason: str = ""


def slowed(busy: NDArray[np.float64], rank: int, delays: NDArray[np.float64]) -> float:
    """Return by how much delays of a rank lengthen the mean step.

    Args:
        busy: busy times (ranks, steps) of normal steps in ms.
        rank: the delayed rank.
        delays: its delays (delayed steps,) in ms; each is combined with each normal step.

    Example:
        >>> slowed(np.array([[4.0, 4.0], [5.0, 5.0]]), 1, np.array([2.0]))
        2.0
        >>> slowed(np.array([[4.0, 4.0], [5.0, 5.0]]), 0, np.array([2.0]))
        1.0
    """
    slowest = busy.max(axis=0)
    late = np.maximum(busy[rank] + delays[:, None], slowest)
    return float((late - slowest).mean())


def judge(found: Iterable[KnownLoss], comparisons: int = len(INJECTED)) -> tuple[Recovery, ...]:
    """Return how much of each loss was recovered, over all rounds of all launches.

    The intervals are those of the mean difference between the recovered and the injected loss, by
    Student's t. Together they contain all injected losses with a probability of 95% (Bonferroni).

    Args:
        found: of one or more launches.
        comparisons: number of losses that are judged together.

    Example:
        >>> loss = KnownLoss(DELAY, (5.0,) * 4, (5.1, 4.9, 5.0, 5.0))
        >>> judge([loss])[0].is_recovered
        True
    """
    by_name: dict[str, list[KnownLoss]] = {}
    for loss in found:
        by_name.setdefault(loss.name, []).append(loss)
    return tuple(_judge(name, losses, comparisons) for name, losses in by_name.items())


def _judge(name: str, losses: Sequence[KnownLoss], comparisons: int) -> Recovery:
    injected = np.array([value for loss in losses for value in loss.injected_ms])
    recovered = np.array([value for loss in losses for value in loss.recovered_ms])
    n = len(injected)
    if not n:
        return Recovery(name, None, None, None, losses[0].reason)
    known = float(injected.mean())
    if n < FEWEST_ROUNDS:
        some = f"{n} round{'s' * (n > 1)}"
        reason = (
            f"{some} of steps are too few, expected {FEWEST_ROUNDS}; make more launches or steps"
        )
        return Recovery(name, known, None, None, reason)
    value = float(recovered.mean())
    error = float((recovered - injected).std(ddof=1)) / n**0.5
    half = student_quantile(n - 1, 1 - 0.025 / comparisons) * error
    estimate = Estimate(value, value - half, value + half, n)
    if half > WIDEST * known:
        reason = f"the interval is wider than ± a third of {known:.3g} ms"
    elif not estimate.low - TOLERANCE * known <= known <= estimate.high + TOLERANCE * known:
        reason = f"the interval does not contain {known:.3g} ms ± {TOLERANCE:.0%}"
    else:
        return Recovery(name, known, estimate, True)
    return Recovery(name, known, estimate, False, reason)
