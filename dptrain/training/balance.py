"""Shares of the ranks in a minibatch: fixed ones, or those that follow the measured speeds.

A rank measures how long it computes in a step, without waiting for other ranks. After each block of
steps all ranks gather these times, and each of them computes the same shares from the same numbers
(`dptrain.plan.measured_shares`). A rank with a step of half the duration per sample then gets twice
as many samples, so that all ranks arrive at the gradient sum at the same time. Loss and gradient
are divided by the number of samples of the global minibatch, so shares of any size are exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from time import monotonic
from typing import TYPE_CHECKING, Any

from dptrain.backends.replica import CropWindowReplica, Replica
from dptrain.comm.world import World
from dptrain.errors import UserError
from dptrain.plan.measured_shares import BLOCKS, MeasuredShares
from dptrain.plan.plan import with_micro_shards
from dptrain.plan.shards import MicroShards
from dptrain.plan.shares import Counts, alone, equal_counts, proportional_counts
from dptrain.training.parallelism import MEASURED, OFF, parse_balance
from dptrain.training.resources import compile_kernels, open_shared_arrays, share_state

if TYPE_CHECKING:
    from dptrain.training.job import Job
    from dptrain.training.settings import Settings
    from dptrain.training.spec import JobSpec

WARM_UP = 2
"""Steps after a change whose times do not count: they touch memory first, or capture programs."""
FIRST_STEPS, MAX_STEPS = 4, 256
"""Steps of the first block, and most steps of a block. After as many steps, ranks with different
backends also receive the parameters of rank 0."""
WINDOW_S = 2.0
"""Time in seconds of the blocks that are compared at once, unless steps are longer than a block. A
process loses its core for up to some 100 ms, and its share should follow within seconds."""


@dataclass(frozen=True)
class Shares:
    """The shares on which all ranks agree.

    Attributes:
        counts: parts of each rank; empty if all ranks have equal shares.
    """

    counts: Counts = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values; empty for equal shares."""
        return asdict(self) if self.counts else {}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Shares:
        """Return the shares of `to_dict`."""
        return cls(tuple(stored["counts"]))

    @property
    def fractions(self) -> list[float]:
        """The share of each rank; they add up to 1."""
        return [count / sum(self.counts) for count in self.counts]

    def __str__(self) -> str:
        """Return a line such as ``rank 0: 78%, rank 1: 22%``."""
        return ", ".join(f"rank {r}: {share:.0%}" for r, share in enumerate(self.fractions))


def first_shares(chosen: Settings, ranks: int) -> Shares:
    """Return the shares with which a job begins.

    Raises:
        UserError: the number of fixed shares is not that of the ranks.
    """
    fixed = parse_balance(chosen.balance)
    total, least = (chosen.shards, 1) if chosen.shards else (chosen.batch_size, 0)
    if fixed and len(fixed) != ranks:
        raise UserError(
            f"--balance {chosen.balance} has {len(fixed)} shares, but the number of ranks is "
            f"{ranks}; use one share for each rank, or --balance measured"
        )
    if chosen.balance == OFF or ranks == 1:
        return Shares()
    counts = proportional_counts(fixed, total, least) if fixed else equal_counts(total, ranks)
    return Shares(counts)


def stored_shares(stored: Mapping[str, Any], spec: JobSpec) -> Shares:
    """Return the shares of a checkpoint if this job can continue with them, else equal ones.

    Ranks without samples are compared with the others again.
    """
    counts = stored.get("counts")
    if spec.balance != MEASURED or not isinstance(counts, list) or len(counts) != spec.ranks:
        return Shares()
    fits = all(type(n) is int and n > 0 for n in counts) and sum(counts) == _total(spec)
    return Shares(tuple(counts)) if fits else Shares()


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
    shards = MicroShards.of_rank(
        chosen.shards, world.rank, world.size, counts=counts, batch_size=chosen.batch_size
    )
    plan = with_micro_shards(old.plan, old.backend, shards, shards.num_samples(chosen.batch_size))
    arrays = None
    if old.arrays.is_shared:
        arrays = open_shared_arrays(replace(chosen, transport="shared"), world, old.backend, plan)
        plan = plan.with_update_share(world.local_size)
    replica = old.backend.make_replica(plan, seed=chosen.seed, arrays=arrays, compiles=False)
    compile_kernels(world, old.backend, quiet=True)
    if replica.owns_parameters:
        replica.memory.copy(replica.flat_parameters, old.flat_parameters)
        for name, flat in replica.flat_state.items():
            replica.memory.copy(flat, old.flat_state[name])
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
        self._job, self._began_step, self._began_s = job, first_step, monotonic()
        self._first_row = job.recorder.steps + WARM_UP
        self._measured: MeasuredShares | None = None
        counts = job.shares.counts
        if job.spec.balance == MEASURED and sum(counts) >= len(counts) > 0:
            self._measured = MeasuredShares(counts, can_exclude=has_idle_ranks(job.spec))
        is_due = self._measured is not None or (job.is_mixed and alone(counts) is None)
        self.due = first_step + FIRST_STEPS if is_due else None
        self._share_step = 0

    def is_due(self, step: int) -> bool:
        """Return True if `next_shares` is due after `step` steps; the same on all ranks."""
        return step == self.due and step < self._job.spec.steps

    def next_shares(self, step: int) -> Shares | None:
        """Compute the shares; all ranks call this if it is due.

        Different backends round differently. So that their parameters do not drift apart, ranks
        with other backends than rank 0 receive those of rank 0.

        Args:
            step: number of complete steps.

        Returns:
            New shares; None if the present ones remain.
        """
        job, measured = self._job, self._measured
        # A rank that has all samples has just shared its parameters.
        is_alone = alone(job.shares.counts) is not None
        if job.is_mixed and not is_alone and step >= self._share_step:
            share_state(job.world, job.replica, mixed=True)
            self._share_step = step + MAX_STEPS
        if measured is None:
            self.due = step + MAX_STEPS
            return None
        reports = job.world.all_gather_json(self._measure())
        block_s = max(report["block_s"] for report in reports)
        times, last = [report["busy_s"] for report in reports], step - self._began_step
        rate = last / block_s
        self._begin_block(
            step, rate * WINDOW_S if is_alone else min(rate * WINDOW_S / BLOCKS, MAX_STEPS)
        )
        is_known = [
            time is not None or not n for time, n in zip(times, measured.counts, strict=True)
        ]
        if not (is_alone or all(is_known)):
            return None  # The steps of the next block are added to these.
        counts = measured.add_block([time or 0.0 for time in times], block_s, last)
        self._first_row = job.recorder.steps
        if counts == job.shares.counts:
            return None
        self._begin_block(step, FIRST_STEPS)
        self._first_row += WARM_UP
        return Shares(counts)

    def _begin_block(self, step: int, num_steps: float) -> None:
        """Begin a block of about so many steps after `step` steps."""
        job, count = self._job, max(round(num_steps), 1)
        self._began_step, self.due, self._began_s = step, step + count, monotonic()
        if not job.engine.separates_sums:
            job.engine.time_stages(job.recorder.steps + count // 2, count)

    def _measure(self) -> dict[str, Any]:
        """Return seconds of the block, and of computation in a step of this rank; None if unknown.

        The second time is unknown if no step with samples of this rank was timed.
        """
        recorder, only_timed = self._job.recorder, not self._job.engine.separates_sums
        rows = recorder.busy_times(self._first_row, only_timed=only_timed)
        is_known = len(rows) and rows[-1, 0]
        busy_s = max(float(rows[:, 1].mean()), 1.0) / 1e9 if is_known else None
        return {"block_s": monotonic() - self._began_s, "busy_s": busy_s}


def _total(spec: JobSpec) -> int:
    """Return the number of parts of a minibatch: micro-shards if there are any, else samples."""
    return spec.shards or spec.batch_size
