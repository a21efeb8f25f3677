"""Shares of the ranks in a minibatch: fixed ones, or those that follow the measured speeds.

A rank measures how long it computes in a step, without waiting for other ranks. After some steps
all ranks gather these times, and each of them computes the same new shares from the same numbers. A
rank with a step of half the duration per sample then gets twice as many samples, so that all ranks
arrive at the gradient sum at the same time. Loss and gradient are divided by the number of samples
of the global minibatch, so shares of any size are exact.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from time import monotonic
from typing import TYPE_CHECKING, Any

import numpy as np

from dptrain.backends.replica import CropWindowReplica, Replica
from dptrain.bounds import Limits, parse_number
from dptrain.comm.world import World
from dptrain.errors import UserError, shown
from dptrain.plan.plan import with_micro_shards
from dptrain.plan.shards import MicroShards
from dptrain.plan.shares import (
    Counts,
    alone,
    better_counts,
    equal_counts,
    proportional_counts,
    step_time,
)
from dptrain.training.resources import compile_kernels, open_shared_arrays, share_state
from dptrain.training.settings import MEASURED, OFF

if TYPE_CHECKING:
    from dptrain.training.job import Job
    from dptrain.training.settings import Settings
    from dptrain.training.spec import JobSpec

EXPECTED = "off, measured, or one share for each rank, such as 3,1"

WARM_UP = 2
"""Steps after a change whose times do not count: they touch memory first, or capture programs."""
FIRST_STEPS, MAX_STEPS = 4, 256
"""Steps before shares are computed for the first time. The interval doubles each time, up to the
second number, because each change discards minibatches that were read ahead and programs that were
captured."""
FIRST_WITHOUT = 3
"""Number of the computation from which on a rank can have no samples; the measurements before
consist of a few steps."""
RETRY_STEPS = 2048
"""Fewest steps after which ranks without samples are measured again, for `FIRST_STEPS` steps.
Whatever made them slow may have ended."""
RETRY_COST = 0.01
"""Part of the time that these measurements may take. Loaders and captured programs are replaced
before and after one, which can take as long as hundreds of steps of a GPU."""
MARGIN = 0.04
"""Smallest reduction of the time of the slowest rank for which shares change. Times of steps on a
machine that others use, too, differ by a few percent."""


@dataclass(frozen=True)
class Shares:
    """The shares on which all ranks agree.

    Attributes:
        counts: parts of each rank; empty if all ranks have equal shares.
        rates: samples that each rank processes in a second, as it measured while it had some; 0 if
            it did not.
        sum_s: time in seconds of a gradient sum for which no rank waits.
    """

    counts: Counts = ()
    rates: tuple[float, ...] = ()
    sum_s: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values; empty for equal shares."""
        return asdict(self) if self.counts else {}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Shares:
        """Return the shares of `to_dict`."""
        return cls(tuple(stored["counts"]), tuple(stored["rates"]), stored["sum_s"])

    @property
    def fractions(self) -> list[float]:
        """The share of each rank; they add up to 1."""
        return [count / sum(self.counts) for count in self.counts]

    def __str__(self) -> str:
        """Return a line such as ``rank 0: 78%, rank 1: 22%``."""
        return ", ".join(f"rank {r}: {share:.0%}" for r, share in enumerate(self.fractions))


def parse_balance(text: str) -> tuple[float, ...]:
    """Return the fixed shares in the value of ``--balance``; none for ``off`` and ``measured``.

    The largest share is 1, so that sums and quotients of shares are finite.

    Raises:
        UserError: the value is neither a name nor a list of shares.
    """
    if text in (OFF, MEASURED):
        return ()
    limits = Limits(at_least=0, at_most=sys.float_info.max)
    found = [parse_number(part, float, limits) for part in text.split(",")]
    shares = [share for share in found if share is not None]
    if len(shares) < len(found) or not any(shares):
        raise UserError(f"balance is '{shown(text)}'; expected {EXPECTED}")
    return tuple(share / max(shares) for share in shares)


def first_shares(chosen: Settings, ranks: int) -> Shares:
    """Return the shares with which a job begins.

    Raises:
        UserError: the number of fixed shares is not that of the ranks.
    """
    fixed = parse_balance(chosen.balance)
    total, least = (chosen.shards, 1) if chosen.shards else (chosen.global_batch, 0)
    if fixed and len(fixed) != ranks:
        raise UserError(
            f"--balance {chosen.balance} has {len(fixed)} shares, but the number of ranks is "
            f"{ranks}; use one share for each rank, or --balance measured"
        )
    if chosen.balance == OFF or ranks == 1:
        return Shares()
    counts = proportional_counts(fixed, total, least) if fixed else equal_counts(total, ranks)
    return Shares(counts, (0.0,) * ranks)


def stored_shares(stored: Mapping[str, Any], spec: JobSpec) -> Shares:
    """Return the shares of a checkpoint if this job can continue with them, else equal ones."""
    if stored.keys() != asdict(Shares()).keys() or spec.balance != MEASURED:
        return Shares()
    found = Shares.from_dict(stored)
    fits = len(found.counts) == spec.ranks and sum(found.counts) == _total(spec)
    return found if fits else Shares()


def has_idle_ranks(spec: JobSpec) -> bool:
    """Return whether ranks can be idle while one rank has all samples.

    With micro-shards, each rank has at least one. With the strategy central, only rank 0 has the
    state of the optimizer.
    """
    return not spec.shards and spec.strategy != "central"


def with_counts(chosen: Settings, world: World, old: Replica, counts: Counts) -> Replica:
    """Return a replica for other numbers of micro-shards, with the same state.

    Args:
        chosen: the settings.
        world: the ranks; every rank calls this function.
        old: the present replica; without micro-shards it is returned, because its plan is for
            a whole minibatch.
        counts: micro-shards of each rank.
    """
    if old.plan.micro_shards is None:
        return old
    shards = MicroShards.of_rank(chosen.shards, world.rank, world.size, counts=counts)
    plan = with_micro_shards(old.plan, old.backend, shards, shards.num_samples(chosen.global_batch))
    arrays = None
    if old.arrays.is_shared:
        arrays = open_shared_arrays(replace(chosen, transport="shared"), world, old.backend, plan)
        plan = plan.with_update_share(world.local_size)
    replica = old.backend.make_replica(plan, seed=chosen.seed, arrays=arrays, compiles=False)
    compile_kernels(world, old.backend, quiet=True)
    if replica.owns_parameters:
        replica.flat_parameters[...] = old.flat_parameters
        for name, flat in replica.flat_state.items():
            flat[...] = old.flat_state[name]
    for name, values in old.statistics.items():
        replica.statistics[name] = values
    replica.updates = old.updates
    if isinstance(old, CropWindowReplica) and old.image_format is not None:
        assert isinstance(replica, CropWindowReplica)
        replica.share_cached_images(old)
    world.node_barrier()
    return replica


class Balancer:
    """Decides after which steps shares change, and how; the same on every rank.

    Args:
        job: the job.
        first_step: number of steps that were complete at the start.

    Attributes:
        due: number of complete steps after which `next_shares` is due; None if it never is.
    """

    def __init__(self, job: Job, first_step: int) -> None:
        self._job, self._interval = job, FIRST_STEPS
        self.due: int | None = None
        self._measures = job.spec.balance == MEASURED and job.world.size > 1
        if self._measures or (job.is_mixed and alone(job.shares.counts) is None):
            self.due = first_step + FIRST_STEPS
        self._first_row, self._number = job.recorder.steps + WARM_UP, 0
        self._retry_step = 0
        self._retry_began_s: float | None = None

    def is_due(self, step: int) -> bool:
        """Return True if `next_shares` is due after `step` steps; the same on all ranks."""
        return step == self.due and step < self._job.spec.steps

    def next_shares(self, step: int) -> Shares | None:
        """Compute the shares; all ranks call this if it is due.

        Different backends round differently. So that their parameters do not drift apart, ranks
        with other backends than rank 0 receive those of rank 0, unless one rank has all samples:
        its engine then copies its parameters to the other ranks.

        Args:
            step: number of complete steps.

        Returns:
            New shares; None if the present ones remain.
        """
        job = self._job
        self._interval = min(2 * self._interval, MAX_STEPS)
        self.due = step + self._interval
        if job.is_mixed and alone(job.shares.counts) is None:
            share_state(job.world, job.replica, mixed=True)
        if not self._measures:
            return None
        reports = job.world.all_gather_json(self._measure())
        if None in reports:
            return None
        self._number += 1
        shares = self._shares_of(reports)
        counts = self._counts(shares, step)
        self._plan_retry(shares, counts, step, max(retry_s for *_, retry_s in reports))
        if counts == shares.counts:
            job.shares = shares
            return None
        self._first_row += WARM_UP
        return replace(shares, counts=counts)

    def _counts(self, shares: Shares, step: int) -> Counts:
        """Return the parts of each rank in the next steps.

        Args:
            shares: the present ones, with the measured rates.
            step: number of complete steps.
        """
        spec, rates, total = self._job.spec, self._part_rates(shares), _total(self._job.spec)
        if any(count and not rate for count, rate in zip(shares.counts, rates, strict=True)):
            return shares.counts  # The minibatch has fewer samples than parts.
        if 0 in shares.counts and step >= self._retry_step and total >= len(rates):
            return proportional_counts(rates, total, least=1)
        without = self._number >= FIRST_WITHOUT and has_idle_ranks(spec)
        return better_counts(
            shares.counts, rates, sum_time=shares.sum_s,
            least=0 if without else min(1, min(shares.counts)), margin=MARGIN,
        )  # fmt: skip

    def _part_rates(self, shares: Shares) -> list[float]:
        """Return the parts of a minibatch that each rank processes in a second."""
        spec = self._job.spec
        return [rate * _total(spec) / spec.batch_size for rate in shares.rates]

    def _plan_retry(self, shares: Shares, counts: Counts, step: int, retry_s: float) -> None:
        """Decide when ranks without samples are measured again, and note when this begins.

        Args:
            shares: the present ones, with the measured rates.
            counts: parts of each rank in the next steps.
            step: number of complete steps.
            retry_s: time in seconds since such a measurement began; 0 if none has now ended.
        """
        self._retry_began_s = None
        if 0 in shares.counts and 0 not in counts:
            self._retry_began_s, self.due = monotonic(), step + FIRST_STEPS
        elif 0 in counts and (0 not in shares.counts or step >= self._retry_step):
            steps = RETRY_STEPS
            if retry_s:  # All rates are known.
                step_s = step_time(counts, self._part_rates(shares), shares.sum_s)
                steps = max(steps, int(2 * retry_s / RETRY_COST / step_s))
            self._retry_step = step + steps
        if alone(counts) is not None:
            self.due = self._retry_step

    def _shares_of(self, reports: Sequence[Sequence[float]]) -> Shares:
        """Return the present shares with the rates that the ranks have measured."""
        before = self._job.shares
        # A rank without samples keeps the rate that it measured before.
        rates = tuple(
            samples / busy_s if samples else rate
            for (samples, busy_s, *_), rate in zip(reports, before.rates, strict=True)
        )
        if alone(before.counts) is not None:
            return replace(before, rates=rates)
        return replace(before, rates=rates, sum_s=min(sum_s for _, _, sum_s, _ in reports))

    def _measure(self) -> list[float] | None:
        """Return this rank's samples in a step, and times in seconds.

        Returns:
            The samples; the times of computation and of sums in a step; the time since ranks
            without samples received some, 0 if they did not. None if no step was timed since the
            last call.
        """
        recorder, only_timed = self._job.recorder, not self._job.engine.separates_sums
        rows = recorder.busy_times(self._first_row, only_timed=only_timed)
        self._first_row = recorder.steps
        if not len(rows):
            return None
        busy_ns = np.median(rows[:, 1])
        # Other programs make some sums longer.
        sum_ns = np.quantile(rows[:, 2], 0.25)
        began_s = self._retry_began_s
        retry_s = 0.0 if began_s is None else monotonic() - began_s
        return [int(rows[-1, 0]), max(float(busy_ns), 1.0) / 1e9, float(sum_ns) / 1e9, retry_s]


def _total(spec: JobSpec) -> int:
    """Return the number of parts of a minibatch: micro-shards if there are any, else samples."""
    return spec.shards or spec.batch_size
