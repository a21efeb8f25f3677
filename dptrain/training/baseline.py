"""Training steps of rank 0 alone, on the same code path and clock as those of the job."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.replica import CropWindowReplica
from dptrain.comm import make_gradient_sum
from dptrain.comm.world import World
from dptrain.data import BatchSource, CropWindowLoader, Loader, Sampler
from dptrain.measure.efficiency import Baseline
from dptrain.measure.input_times import InputTimes
from dptrain.measure.recorder import STEP, StepRecorder
from dptrain.plan.buckets import make_buckets
from dptrain.plan.plan import make_plan
from dptrain.plan.shards import MicroShards
from dptrain.training.engines import make_engine
from dptrain.training.job import Job

WARM_UP, WARM_UP_ASYNCHRONOUS = 3, 20
"""Steps before the clock counts. The first ones touch memory and load code for the first time. On a
GPU they are also captured, and its clock rises from its idle rate."""
NO_BASELINE = Baseline(np.zeros(0, np.int64), np.zeros(0, np.int64))


def open_loader(
    job: Job,
    *,
    batch_size: int,
    rank: int,
    size: int,
    first: int,
    last: int,
    micro_shards: MicroShards | None = None,
    times: InputTimes | None = None,
) -> BatchSource:
    """Return the batches of the training steps `first` … `last` − 1 for one of `size` ranks.

    The loader adds its times to `times`.
    """
    data = job.dataset
    sampler = Sampler(len(data.train), batch_size, job.spec.seed, rank, size, micro_shards)
    steps, shapes = range(first, last), (data.input_shape, data.target_shape)
    cached, augmentation = job.cached_samples, job.augmentation
    if cached is not None:
        return CropWindowLoader(
            cached, sampler, steps, *shapes, augmentation=augmentation, times=times
        )
    return Loader(
        data.train,
        sampler,
        steps,
        *shapes,
        augmentation=augmentation,
        depth=job.spec.prefetch,
        keeps_pixels=job.streams_pixels,
        times=times,
    )


def measure_baseline(job: Job) -> Baseline:
    """Time rank 0 alone, with the shard of one rank and with the whole minibatch.

    The other ranks wait. A separate replica makes the steps, so the parameters of the job stay as
    they are. One rank has nothing to compare with, so nothing is measured then.
    """
    weak, strong = NO_BASELINE.weak, NO_BASELINE.strong
    if not job.spec.baseline_steps or job.world.size == 1:
        return NO_BASELINE
    if job.world.is_rank_zero:
        weak = time_alone(job, job.local_batch, job.plan.setting.shards)
        same = job.local_batch == job.spec.batch_size
        strong = weak if same else time_alone(job, job.spec.batch_size, job.spec.shards)
    job.world.barrier()
    return Baseline(weak, strong)


def time_alone(job: Job, batch_size: int, shards: int = 0) -> NDArray[np.int64]:
    """Return the time in ns of each timed step with `batch_size` samples in `shards` micro-shards;
    0 for none.
    """
    micro_shards = MicroShards.of_rank(shards) if shards else None
    plan = make_plan(
        job.network,
        job.backend,
        batch_size,
        precision=job.plan.precision,
        optimizer=job.plan.optimizer,
        threads=job.plan.setting.threads,
        micro_shards=micro_shards,
        # Measured kernels are for one batch size.
        selection=job.plan.setting.selection if batch_size == job.local_batch else None,
    )
    replica = job.backend.make_replica(plan, seed=job.spec.seed)
    buckets = make_buckets(plan, None)
    recorder = StepRecorder(plan.stages)
    gradient_sum = make_gradient_sum(job.spec.strategy, World.single(), replica, buckets)
    engine = make_engine(replica, gradient_sum, buckets, recorder)
    warm_up = WARM_UP
    if engine.max_steps_in_flight:
        warm_up = WARM_UP_ASYNCHRONOUS
        # Timing by stage slows a step of a device down. On a host all steps are timed so, and
        # those of the job too.
        engine.time_stages(None)
    if job.cached_samples is not None or job.streams_pixels:
        assert isinstance(replica, CropWindowReplica)
        replica.share_cached_images(job.replica)
    steps = warm_up + job.spec.baseline_steps
    with open_loader(
        job,
        batch_size=batch_size,
        rank=0,
        size=1,
        first=0,
        last=steps,
        micro_shards=micro_shards,
    ) as loader:
        for _ in range(steps):
            engine.step(loader, 0.0)
            engine.results()
    engine.results(wait=True)
    rows, counts, _ = recorder.all_rows()
    counted = (np.arange(steps)[-len(rows) :] >= warm_up) & (counts == counts.max())
    times: NDArray[np.int64] = rows[counted, recorder.names.index(STEP)]
    return times
