"""The learning-rate range test: train with a rising learning rate, and watch the loss.

Source: Smith, "Cyclical learning rates for training neural networks", 2017, section 3.3.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from dptrain.comm.collective import call_on_all_ranks, call_on_rank_zero
from dptrain.comm.world import World
from dptrain.data.loading.loader import BatchSource
from dptrain.errors import UserError
from dptrain.measure.console import make_console
from dptrain.training.baseline import open_loader
from dptrain.training.job import Job, assemble
from dptrain.training.output.summary import data_lines
from dptrain.training.schedules import OWN_SETTINGS, ScheduleSettings
from dptrain.training.settings import Settings

SMOOTHING = 0.9
"""Weight of earlier steps in the moving average of the loss."""
DIVERGED = 4.0
"""The test ends if the average exceeds the smallest one by this factor."""
SETTLING = 5
"""Steps at the beginning that select no rate: the average has few values."""


@dataclass(frozen=True)
class RangeOptions:
    """Options of a range test.

    Attributes:
        low, high: the first and the last learning rate.
        steps: number of training steps; the rate grows by the same factor from step to step.
    """

    low: float = 1e-6
    high: float = 10.0
    steps: int = 200

    def __post_init__(self) -> None:
        if not 0.0 < self.low < self.high < math.inf:
            raise UserError(
                f"the learning rates are {self.low:g} to {self.high:g}; expected 0 < --from < --to"
            )
        if self.steps < 2 * SETTLING:
            raise UserError(f"--steps is {self.steps}; expected at least {2 * SETTLING}")

    def rate(self, step: int) -> float:
        """Return the learning rate of step number `step`, counted from 0."""
        return float(self.low * (self.high / self.low) ** (step / (self.steps - 1)))


@dataclass(frozen=True)
class RangeTest:
    """The result of a range test.

    Attributes:
        network, data, optimizer, batch_size, ranks: of the job.
        steepest: rate at which the averaged loss falls fastest, a rate for constant schedules; None
            if the loss never fell.
        lowest: rate with the lowest averaged loss; larger rates are too large.
        diverged: rate at which the test ended early; None if all steps were made.
        rates, losses, averages: of each step; the last loss may be missing if it was not finite.
        flag_factor: value of ``--learning-rate`` divided by the rate; ``--scale-rate`` changes it.
    """

    network: str
    data: str
    optimizer: str
    batch_size: int
    ranks: int
    steepest: float | None
    lowest: float
    diverged: float | None
    rates: Sequence[float]
    losses: Sequence[float]
    averages: Sequence[float]
    flag_factor: float = 1.0

    @property
    def advice(self) -> str:
        """Which rate or which flags to try."""
        if self.steepest is not None:
            return f"try --learning-rate {self.steepest * self.flag_factor:.2g}"
        if self.diverged is not None:
            low = self.rates[0]
            return f"the loss rose from the beginning; try a smaller --from than {low:.2g}"
        return "the loss never fell; try larger learning rates (--to) or more --steps"

    def facts(self) -> dict[str, Any]:
        """Return all values except those of each step."""
        steps = ("rates", "losses", "averages", "flag_factor")
        return {name: value for name, value in asdict(self).items() if name not in steps}

    def to_csv(self) -> str:
        """Return a line for each step."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["learning_rate", "loss", "average_loss"])
        writer.writerows(zip(self.rates, self.losses, self.averages, strict=True))
        return text.getvalue()


def find_rate(
    settings: Settings,
    world: World,
    options: RangeOptions,
    *,
    write: Callable[[RangeTest], object] | None = None,
    quiet: bool = False,
) -> RangeTest | None:
    """Make training steps with a rising learning rate; the trained parameters are discarded.

    Args:
        settings: settings of the job. Its learning rate, its schedule, its length and its run
            directory are ignored.
        world: the ranks; every rank calls this function.
        options: options of the test.
        write: called with the result on rank 0; None writes nothing.
        quiet: print no progress.

    Returns:
        The result on rank 0; None on other ranks.

    Raises:
        UserError: a mistake of the user, or a loss that is not finite from the beginning.
    """
    unset = {
        each.name: each.metadata["unset"]
        for each in fields(ScheduleSettings)
        if each.name in OWN_SETTINGS
    }
    chosen = replace(
        settings, steps=options.steps, epochs=0, run_dir=None, resume=None, warmup_steps=0,
        schedule="constant", until_accuracy=0.0, patience=0, best_by=None, **unset,
    )  # fmt: skip
    job = assemble(chosen, world, keeps_run=False, quiet=quiet)
    if world.is_rank_zero and not quiet:
        for line in data_lines(job.network, job.dataset):
            make_console().print(line, soft_wrap=True)
    with (
        job.engine,
        open_loader(
            job,
            range(options.steps),
            batch_size=job.spec.batch_size,
            **job.passes,
        ) as batches,
    ):
        losses = _make_steps(job, batches, options)
    result = call_on_all_ranks(world, lambda: _conclude(job, options, losses))

    def conclude() -> RangeTest:
        if write is not None:
            write(result)
        return result

    return call_on_rank_zero(world, conclude)


def _make_steps(job: Job, batches: BatchSource, options: RangeOptions) -> list[float]:
    """Return the losses of the steps until the loss grows too large, the same on every rank."""
    losses: list[float] = []
    for step in range(options.steps):
        job.engine.step(batches, options.rate(step))
        losses += [result.loss for result in job.engine.results(wait=True)]
        averages = moving_average(losses)
        if not math.isfinite(losses[-1]) or averages[-1] > DIVERGED * min(averages):
            break
    return losses


def _conclude(job: Job, options: RangeOptions, losses: list[float]) -> RangeTest:
    ended = len(losses) < options.steps or not math.isfinite(losses[-1])
    finite = losses if math.isfinite(losses[-1]) else losses[:-1]
    if len(finite) <= SETTLING:
        raise UserError(
            f"the loss is not finite after {len(finite)} steps with learning rates from "
            f"{options.low:g}; try a smaller --from"
        )
    rates = [options.rate(step) for step in range(len(finite))]
    averages = moving_average(finite)
    steepest, lowest = select_rates(rates, averages)
    return RangeTest(
        network=job.network.name,
        data=job.dataset.name,
        optimizer=job.spec.optimizer,
        batch_size=job.spec.batch_size,
        ranks=job.world.size,
        steepest=steepest,
        lowest=lowest,
        diverged=options.rate(len(losses) - 1) if ended else None,
        rates=rates,
        losses=finite,
        averages=averages,
        flag_factor=job.spec.learning_rate / job.schedule.base,
    )


def moving_average(values: Sequence[float]) -> list[float]:
    """Return the exponential moving average, corrected for its beginning as Adam's moments.

    Example:
        >>> moving_average([2.0, 2.0])
        [2.0, 2.0]
    """
    mean, found = 0.0, []
    for index, value in enumerate(values):
        mean = SMOOTHING * mean + (1.0 - SMOOTHING) * value
        found.append(round(mean / (1.0 - SMOOTHING ** (index + 1)), 12))
    return found


def select_rates(rates: Sequence[float], averages: Sequence[float]) -> tuple[float | None, float]:
    """Return the rate at which the average falls fastest per factor of the rate, and the lowest.

    Args:
        rates: rising by the same factor from step to step.
        averages: averaged losses.
    """
    lowest = min(range(SETTLING, len(averages)), key=averages.__getitem__)
    falls = [averages[i - 1] - averages[i + 1] for i in range(SETTLING, lowest)]
    if not falls or max(falls) <= 0.0:
        return None, rates[lowest]
    return rates[SETTLING + falls.index(max(falls))], rates[lowest]
