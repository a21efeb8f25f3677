"""The error of a training whose loss is not finite, with advice that follows from its steps."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import NoReturn

from dptrain.comm.world import DivergedError
from dptrain.errors import UserError
from dptrain.training.engines import StepResult
from dptrain.training.job import Job

MARGIN = 0.5
"""Suggested learning rate / rate at the lowest loss."""

AVERAGED_STEPS = 5
"""Time constant of the averaged loss: the losses of single minibatches scatter."""

FALLEN = 0.9
"""The loss fell if its average is at most this share of the first loss."""


class StableRate:
    """The learning rate at which the loss was lowest, if it fell at all.

    Attributes:
        last: rate of the last update; 0 before the first one.
    """

    def __init__(self) -> None:
        self.last = self._rate = 0.0
        self._first = self._average = self._lowest = math.nan
        self._fell = False

    def add(self, loss: float, rate: float) -> None:
        """Count a step.

        Args:
            loss: before its update.
            rate: of its update.
        """
        if math.isnan(self._first):
            self._first = self._average = self._lowest = loss
        self._average += (loss - self._average) / AVERAGED_STEPS
        self._fell = self._fell or self._average < FALLEN * self._first
        if loss < self._lowest:
            self._lowest, self._rate = loss, self.last
        self.last = rate

    @property
    def rate(self) -> float:
        """Rate of the update before the lowest loss; 0 if the averaged loss never fell."""
        return self._rate if self._fell else 0.0


def raise_not_finite(job: Job, result: StepResult, stable: StableRate) -> NoReturn:
    """Raise the same error on every rank, with the first layer whose values are not finite.

    Rank 0 writes it to the run directory.
    """
    found = job.world.all_gather_json(job.replica.first_non_finite())
    layers = {rank: layer for rank, layer in enumerate(found) if layer is not None}
    if layers:
        layer = next(iter(layers.values()))
        ranks = [str(rank) for rank, other in layers.items() if other == layer]
        where = f"first in {layer} (rank{'s' * (len(ranks) > 1)} {', '.join(ranks)})"
    else:
        where = "first in the loss itself"
    # All ranks have the same values, so they agree without another call.
    message = (
        f"training diverged: the loss is {result.loss} at step {result.step + 1}, {where}; "
        f"{advice(result.step, stable, job.spec.learning_rate / job.schedule.base)}"
    )
    if job.run is not None:
        with suppress(UserError):  # A disk that is full does not hide the loss.
            job.run.write_failure(message)
    raise DivergedError(message)


def advice(step: int, stable: StableRate, factor: float) -> str:
    """Return what to do about a loss that is not finite.

    Args:
        step: number of the step, from 0.
        stable: the steps before.
        factor: value of ``--learning-rate`` divided by the highest rate of the schedule, which
            `--scale-rate` changes.
    """
    if step == 0:
        return (
            "no update was made yet, so the learning rate is not the cause; look for values that "
            "are not finite or very large with `dptrain data check`, and in --weights"
        )
    if 0 < stable.rate < stable.last:
        return (
            f"the loss was lowest at a learning rate of {stable.rate * factor:.2g} and rose at "
            f"larger ones, so try --learning-rate {MARGIN * stable.rate * factor:.1g}"
        )
    return (
        f"the learning rate {stable.last * factor:.2g} is too large, or the data has very large "
        "values; `dptrain find-rate` with the same network, data and batch size proposes a rate, "
        "and `dptrain data check` checks the values"
    )
