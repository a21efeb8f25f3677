"""What a point loses against the ideal step, by part, with intervals over launches."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from dptrain.measure.profile.profile import Parts
from dptrain.measure.statistics import FEWEST, Estimate
from dptrain.measure.student import student


def mean_parts(launches: Sequence[Parts], step_ms: float) -> Parts:
    """Return the parts of a step, by the share of each in all steps of all launches.

    Args:
        launches: parts of the mean step of each launch, at least one. `uniform` makes them alike.
        step_ms: the step to which the result adds up.
    """
    totals = {name: sum(each.known[name] for each in launches) for name in launches[0].known}
    whole = sum(totals.values())
    return Parts(**totals).times(step_ms / whole)


def uniform(launches: Sequence[Parts], others: Sequence[Parts] = ()) -> list[Parts]:
    """Return the parts of some launches, alike in whether they know the time without a core.

    If one of them, or of the launches with which they are compared, does not know it, that of all
    is in `compute`. Evaluations and checkpoints belong to no study.
    """
    known = all(each.without_core is not None for each in (*launches, *others))
    found = launches if known else [each.merged() for each in launches]
    return [each.without_breaks() for each in found]


def subtract(one: Parts, two: Parts) -> Parts:
    """Return the differences of parts, which know the same."""
    return Parts(**{name: value - two.known[name] for name, value in one.known.items()})


def loss_intervals(
    loss: Parts, own: Sequence[Parts], ideal: Sequence[Parts], *, paired: bool
) -> dict[str, Estimate]:
    """Return the loss of each part with its 95% interval over launches.

    The interval is Student's for the mean difference of the launches of a round, or Welch's with
    the smaller number of degrees of freedom if they are not paired. With fewer than `FEWEST`
    launches it is infinite.

    Args:
        loss: the values.
        own: parts of the launches of the point, as `uniform` returns them.
        ideal: parts of the launches of the base, times the factor of the ideal step.
        paired: True if launch i of both belongs to one round.
    """
    found = {}
    for name, value in loss.known.items():
        one, two = (np.array([each.known[name] for each in side]) for side in (own, ideal))
        n = min(len(one), len(two))
        if n < FEWEST:
            found[name] = Estimate(value, -math.inf, math.inf, n)
            continue
        if paired:
            variance = float(np.var(one - two, ddof=1)) / n
        else:
            variance = sum(float(np.var(side, ddof=1)) / len(side) for side in (one, two))
        half = student(n - 1) * math.sqrt(variance)
        found[name] = Estimate(value, value - half, value + half, n)
    return found
