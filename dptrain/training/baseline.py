"""Training steps of rank 0 alone, by the very code and clock that time the job."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.device_replica import DeviceReplica
from dptrain.comm import make_gradient_sum
from dptrain.comm.world import World
from dptrain.data.loader import Loader
from dptrain.measure.efficiency import Baseline
from dptrain.measure.recorder import STEP, StepRecorder
from dptrain.plan.buckets import make_buckets
from dptrain.plan.plan import make_plan
from dptrain.training.engines import make_engine
from dptrain.training.setup import Job

WARM_UP, WARM_UP_ENQUEUED = 3, 20
"""Steps before the clock counts: the first ones touch memory and load code for the first time.
Where steps are enqueued they are captured, too, and a GPU that rested takes a while to its pace."""
NO_BASELINE = Baseline(np.zeros(0, np.int64), np.zeros(0, np.int64))


def open_loader(
    job: Job, *, batch_size: int, rank: int, size: int, first: int, last: int
) -> Loader:
    """Batches of training steps `first` to `last` − 1 for one of `size` ranks."""
    return Loader(
        job.dataset.train,
        input_shape=job.dataset.input_shape,
        target_shape=job.dataset.target_shape,
        batch_size=batch_size,
        seed=job.config.seed,
        rank=rank,
        size=size,
        first_step=first,
        last_step=last,
        augmentation=job.augmentation,
        depth=job.prefetch,
        reads=job.pictures is None,
    )


def measure_baseline(job: Job) -> Baseline:
    """Rank 0 trains alone, with a rank's share and then the whole minibatch; the others rest.

    The parameters of the job stay as they are: a replica of its own makes the steps.
    """
    weak, strong = NO_BASELINE.weak, NO_BASELINE.strong
    if job.config.baseline_steps and job.world.is_rank_zero:
        weak = _time_alone(job, job.local_batch)
        same = job.local_batch == job.config.batch_size
        strong = weak if same else _time_alone(job, job.config.batch_size)
    job.world.barrier()
    return Baseline(weak, strong)


def _time_alone(job: Job, batch_size: int) -> NDArray[np.int64]:
    """Nanoseconds of each of the timed steps with `batch_size` samples."""
    plan = make_plan(
        job.network,
        job.backend,
        batch_size,
        precision=job.plan.precision,
        optimizer=job.plan.optimizer,
        threads=job.plan.setting.threads,
    )
    replica = job.backend.make_replica(plan, seed=job.config.seed)
    buckets = make_buckets(plan, None)
    recorder = StepRecorder(plan.stages)
    alone = make_gradient_sum(job.config.strategy, World.single(), replica, buckets)
    engine = make_engine(replica, alone, buckets, recorder)
    warm_up = WARM_UP
    if replica.memory.asynchronous:
        warm_up = WARM_UP_ENQUEUED
        # By stage they take longer; elsewhere all steps are timed so, these and the job's.
        engine.time_stages(None)
    if job.pictures is not None:
        assert isinstance(replica, DeviceReplica)
        replica.share_cached_images(job.replica)
    steps = warm_up + job.config.baseline_steps
    with open_loader(job, batch_size=batch_size, rank=0, size=1, first=0, last=steps) as loader:
        for _ in range(steps):
            engine.step(loader, 0.0)
            engine.results()
    engine.results(wait=True)
    rows, counts, _ = recorder.in_order()
    counted = (np.arange(steps)[-len(rows) :] >= warm_up) & (counts == counts.max())
    times: NDArray[np.int64] = rows[counted, recorder.names.index(STEP)]
    return times
