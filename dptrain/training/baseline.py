"""Training steps of rank 0 alone, on the same code path and clock as those of the job.

They are made in blocks between the steps of the job, see `InterleavedBaseline`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.device_replica import DeviceReplica
from dptrain.backends.replica import CropWindowReplica, Replica
from dptrain.batch import Batch
from dptrain.comm import make_gradient_sum
from dptrain.comm.world import World
from dptrain.data import BatchSource, CropWindowLoader, Loader, Sampler
from dptrain.data.loading.weighting import WeightedBatches
from dptrain.errors import UserError
from dptrain.measure.efficiency import Baseline, Pair
from dptrain.measure.input_times import InputTimes
from dptrain.measure.recorder import StepRecorder
from dptrain.measure.statistics import FEWEST
from dptrain.measure.step_record import CHECKPOINT, EVALUATION, EXPOSED, STEP
from dptrain.memory import require_memory
from dptrain.plan.buckets import make_buckets
from dptrain.plan.plan import Plan, make_plan
from dptrain.plan.shards import MicroShards
from dptrain.training.engines import make_engine
from dptrain.training.evaluation.evaluation import images_for
from dptrain.training.job import Job
from dptrain.training.parallelism import OFF

WARM_UP, WARM_UP_ASYNCHRONOUS = 3, 20
"""Steps before the clock counts. The first ones touch memory and load code for the first time. On a
GPU they are also captured, and its clock rises from its idle rate."""
MAX_COST = 0.02
"""Largest share of a run that the blocks take."""
PLANNED = 0.85
"""Share of that cost which is planned, because blocks and the rest of the run may take longer or
shorter than expected."""
SETUP_S = 0.1
"""Time to make the two replicas of a small network. Large ones take longer, as do their steps."""
FIRST_BLOCK = 50
"""Number of steps before the first block, from which the duration of the run is estimated."""
TOGETHER = 10
"""A block of the job has at least this many times the steps of a block of rank 0 alone, which cost
nothing: an interruption of any rank is rare in a few steps."""
GOOD_BLOCKS, MAX_BLOCKS = 8, 16
"""Blocks get shorter until so many fit in, and there are never more than so many."""
TOO_SHORT = (
    "scaling efficiency not measured: the run is too short to also time steps of rank 0 alone, "
    "for which 2% of the run is reserved; train longer, or use dptrain scale"
)

TOO_FEW = (
    f"scaling efficiency not measured: fewer than {FEWEST} blocks of steps of rank 0 alone were "
    "made, because they took longer than planned; train longer, or use dptrain scale"
)

NO_COMMON_WORK = (
    "scaling efficiency not measured: it is defined for equal shares, but --balance divides the "
    "minibatch"
)


def whole_minibatches(batches: Iterator[Batch], job: Job) -> Iterator[Batch]:
    """Yield the batches of whole minibatches; the last one of an epoch may be smaller."""
    whole = min(job.spec.batch_size, len(job.dataset.train))
    return (batch for batch in batches if batch.global_count == whole)


def open_loader(
    job: Job,
    steps: range,
    *,
    batch_size: int,
    micro_shards: MicroShards | None = None,
    passes: int = 1,
    times: InputTimes | None = None,
    replica: Replica | None = None,
    world: World | None = None,
) -> BatchSource:
    """Return the batches of some training steps.

    There is one for each pass of a step. The loader adds its times to `times`. The batches are for
    this rank of `world` and for `replica`, by default those of the job.
    """
    data, replica = job.dataset, job.replica if replica is None else replica
    world = job.world if world is None else world
    counts = job.shares.counts if world.size == job.world.size and micro_shards is None else ()
    sampler = Sampler(
        len(data.train), batch_size, job.spec.seed, world.rank, world.size, micro_shards, passes,
        counts, job.labels,
    )  # fmt: skip
    shapes = data.input_shape, data.target_shape
    cached, augmentation = job.cached_samples, job.augmentation
    encode = replica.encode_windows if isinstance(replica, DeviceReplica) else None
    batches: BatchSource
    if cached is not None:
        batches = CropWindowLoader(
            cached,
            sampler,
            steps,
            *shapes,
            augmentation=augmentation,
            encode=encode,
            times=times,
        )
    else:
        batches = Loader(
            images_for(replica, data.train) if job.streams_pixels else data.train,
            sampler,
            steps,
            *shapes,
            augmentation=augmentation,
            depth=job.spec.prefetch,
            keeps_pixels=job.streams_pixels,
            encode=encode,
            times=times,
        )
    weights = job.sample_weights
    return batches if weights is None else WeightedBatches(batches, sampler, weights)


class RankAlone:
    """Rank 0 alone: makes training steps on a replica with parameters of its own.

    Args:
        job: the job; its replica, its engine and its parameters stay as they are.
        batch_size: number of samples of each step.
        shards: number of micro-shards; 0 for none.

    Raises:
        MemoryError, UserError: the replica does not fit into memory, or the passes of a step do not
            fit the micro-shards.
    """

    def __init__(self, job: Job, batch_size: int, shards: int = 0) -> None:
        passes = job.plan.passes
        micro_shards = MicroShards.of_rank(shards, passes=passes) if shards else None
        pass_size = math.ceil(batch_size / passes)
        plan = make_plan(
            job.network,
            job.backend,
            pass_size,
            precision=job.plan.precision,
            optimizer=job.plan.optimizer,
            threads=job.plan.setting.threads,
            micro_shards=micro_shards,
            recompute=job.plan.setting.recompute,
            label_smoothing=job.plan.setting.label_smoothing,
            weighted=job.plan.setting.weighted,
            # Measured kernels are for one batch size.
            selection=job.plan.setting.selection if pass_size == job.plan.batch_size else None,
            passes=passes,
        )
        _require_memory(job, plan)
        replica = job.backend.make_replica(plan, seed=job.spec.seed)
        if job.cached_samples is not None or job.streams_pixels:
            assert isinstance(replica, CropWindowReplica)
            replica.share_cached_images(job.replica)
        buckets = make_buckets(plan)
        self._recorder = StepRecorder(plan.stages)
        world = World.single()
        gradient_sum = make_gradient_sum(job.spec.strategy, world, replica, buckets)
        self._engine = make_engine(replica, gradient_sum, buckets, self._recorder)
        self._first_warm_up = WARM_UP
        if self._engine.max_steps_in_flight:
            self._first_warm_up = WARM_UP_ASYNCHRONOUS
            # Timing by stage slows a step of a device down. On a host all steps are timed so, and
            # those of the job too.
            self._engine.time_stages(None)
        self._open_loader = partial(
            open_loader,
            job,
            batch_size=batch_size,
            micro_shards=micro_shards,
            passes=passes,
            replica=replica,
            world=world,
        )

    def time_steps(self, steps: int) -> NDArray[np.int64]:
        """Make steps; return the time in ns of each one with a whole minibatch after the warm-up.

        The first call has a longer warm-up.
        """
        recorder = self._recorder
        warm_up = WARM_UP if recorder.steps else self._first_warm_up
        first, last = recorder.steps, recorder.steps + warm_up + steps
        recorder.restart()
        with self._open_loader(range(first, last)) as loader:
            for _ in range(first, last):
                self._engine.step(loader, 0.0)
                self._engine.results()
            self._engine.results(wait=True)
        rows, counts, _ = recorder.all_rows()
        numbers = np.arange(last - len(rows), last)
        counted = (numbers >= first + warm_up) & (counts == counts.max())
        times: NDArray[np.int64] = rows[counted, recorder.names.index(STEP)]
        return times


class InterleavedBaseline:
    """Blocks of steps of rank 0 alone between the steps of the job.

    T(1) and T(p) are measured in turns, because the load of a machine changes. The other ranks wait
    meanwhile. All blocks, and the replicas that they need, are planned to take at most `MAX_COST`
    of the run; if fewer than three blocks fit into the plan, nothing is measured. If blocks take
    longer than planned, fewer are made, and below three there is no efficiency.

    Args:
        job: the job.
        first_step: number of steps that were complete at the start.

    Attributes:
        due: number of complete steps after which the next block follows; None if none does.
    """

    def __init__(self, job: Job, first_step: int) -> None:
        self._job, self._begin = job, monotonic()
        self.due: int | None = None
        self._alone: tuple[RankAlone, RankAlone] | None = None
        self._pairs = list[Pair]()
        self._num_blocks = self._num_steps = 0
        self._steps_alone = self._steps_together = 0
        self._spent_s = 0.0
        self._why = ""
        if job.spec.balance != OFF:
            self._why = NO_COMMON_WORK
        elif job.spec.baseline_steps and job.world.size > 1:
            self.due, self._why = first_step + FIRST_BLOCK, TOO_SHORT

    def is_due(self, step: int) -> bool:
        """Return True if a block follows after `step` complete steps; the same on all ranks."""
        return step == self.due and step < self._job.spec.steps

    def run_block(self, step: int) -> None:
        """Time a block on rank 0 while the other ranks wait; all ranks call this.

        Args:
            step: number of complete steps.
        """
        world = self._job.world
        if world.is_rank_zero:
            begin = monotonic()
            self.due = self._run_block(step)
            self._spent_s += monotonic() - begin
        world.barrier()
        self.due = world.broadcast_json(self.due)
        self._job.recorder.restart()

    def close(self) -> None:
        """Release the replicas."""
        self._alone = None

    def result(self) -> Baseline:
        """Return the blocks that were measured."""
        share = self._spent_s / max(monotonic() - self._begin, 1e-9)
        why = TOO_FEW if 0 < len(self._pairs) < FEWEST else self._why
        return Baseline(tuple(self._pairs), self._steps_alone, self._steps_together, share, why)

    def _run_block(self, step: int) -> int | None:
        """Time a block; return the step after which the next one is due."""
        begin = monotonic()
        job, times = self._job, step_times(self._job)
        left = job.spec.steps - step
        run_s = begin - self._begin + left * float(times.mean()) / 1e9
        if self._alone is None:
            self._choose(PLANNED * MAX_COST * run_s - SETUP_S)
            if not self._num_blocks:
                return None
            try:
                self._alone = (
                    RankAlone(job, job.local_batch, job.plan.setting.shards * job.plan.passes),
                    RankAlone(job, job.spec.batch_size, job.spec.shards),
                )
            except (MemoryError, UserError) as error:
                self._why = f"scaling efficiency not measured: {error}"
                return None
        steps, size, block_begin = self._num_steps, job.world.size, monotonic()
        weak, strong = (alone.time_steps(steps) for alone in self._alone)
        together = times[-steps * max(size, TOGETHER) :]
        self._pairs.append(Pair(*(float(t.mean()) for t in (weak, strong, together))))
        self._steps_alone += len(weak)
        self._steps_together += len(together)
        self._why = ""
        end = monotonic()
        left_s = PLANNED * MAX_COST * run_s - self._spent_s - (end - begin)
        affordable = left_s / (end - block_begin)
        following = min(self._num_blocks - len(self._pairs), int(affordable))
        return step + max(left // (following + 1), 1) if following > 0 else None

    def _choose(self, budget_s: float) -> None:
        """Choose the number of blocks and of steps in each that a budget in seconds allows."""
        job = self._job
        # With the whole minibatch a step takes about as long as one for each rank.
        pair_s = (1 + job.world.size) * _busy_s(job)
        for steps in range(job.spec.baseline_steps, 1, -1):
            blocks = int(budget_s / (pair_s * (WARM_UP + steps)))
            if blocks >= GOOD_BLOCKS or steps == 2:
                break
        else:
            steps, blocks = 1, int(budget_s / (pair_s * (WARM_UP + 1)))
        self._num_steps, self._num_blocks = steps, 0 if blocks < FEWEST else min(blocks, MAX_BLOCKS)


def _require_memory(job: Job, plan: Plan) -> None:
    """Raise an error if there is no memory for another replica."""
    require_memory(
        sum(plan.memory.values()),
        f"{job.network.name} on rank 0 alone with {plan.batch_size:,} samples",
        available_bytes=job.backend.free_bytes(),
    )


def step_times(job: Job) -> NDArray[np.int64]:
    """Return the durations in ns of the job's last steps on this rank, oldest first.

    Only steps with a whole minibatch count, without evaluation and checkpoint before them, and on a
    device without timing by stage.
    """
    recorder = job.recorder
    rows, counts, timed = recorder.all_rows()
    between = [recorder.names.index(name) for name in (EVALUATION, CHECKPOINT)]
    counted = (counts == counts.max()) & (rows[:, between].sum(axis=1) == 0)
    if job.replica.memory.asynchronous:
        counted &= ~timed
    counted = counted if counted.any() else counts == counts.max()
    times: NDArray[np.int64] = rows[counted, recorder.names.index(STEP)]
    return times


def _busy_s(job: Job) -> float:
    """Return the duration of a step of this rank in seconds, on a host without communication."""
    recorder = job.recorder
    rows, counts, _ = recorder.all_rows()
    busy = rows[:, recorder.names.index(STEP)]
    if not job.replica.memory.asynchronous:
        busy = busy - rows[:, recorder.names.index(EXPOSED)]
    return float(np.median(busy[counts == counts.max()])) / 1e9
