"""A training job with all of its parts: data, plan, replica, engine, schedule, run directory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain import __version__
from dptrain.backends.base import Backend
from dptrain.backends.device_replica import DeviceReplica
from dptrain.backends.replica import Replica
from dptrain.comm import make_gradient_sum
from dptrain.comm.agreement import agree
from dptrain.comm.collective import call_on_all_ranks, call_on_rank_zero
from dptrain.comm.world import World
from dptrain.data import Dataset, open_data
from dptrain.data.augmentation import Augmentation
from dptrain.data.base import Samples
from dptrain.data.crop_windows import can_cache_on_device
from dptrain.data.fingerprint import data_fingerprint
from dptrain.data.sharding import steps_per_epoch
from dptrain.data.stored import CachedSamples
from dptrain.measure.recorder import StepRecorder
from dptrain.network.files import network_to_dict
from dptrain.network.network import Network
from dptrain.plan.buckets import Bucket, make_buckets
from dptrain.plan.plan import Plan, make_plan
from dptrain.training.engines import Engine, make_engine
from dptrain.training.persistence import open_run, restore_run, start_run
from dptrain.training.resources import (
    bucket_bytes,
    check_memory,
    choose_prefetch,
    compute_threads,
    describe_ranks,
    find_transport,
    make_replica,
    open_backend,
    share_state,
)
from dptrain.training.rundir import RunDirectory
from dptrain.training.schedules import Schedule
from dptrain.training.settings import Settings
from dptrain.training.spec import JobSpec, RunSpec, digest, job_settings, resolve_job

DEVICE_SHARE = 0.5
"""Largest share of the free device memory that a cached data set may take."""


@dataclass
class Job:
    """Everything that a training loop needs.

    Attributes:
        settings: what the user chose, with the recipe of the network filled in.
        spec: the resolved settings.
        run_spec: the whole specification, with data, preprocessing and ranks.
        buckets: parts of the gradient that are summed one after the other.
        cached_images: training images that the device caches, float32 (M, C, H, W); None if
            minibatches are copied to it.
        run: the run directory; None on other ranks than 0 and if there is none.
        first_step: number of the first step; above 0 after a resume.
        warning: one line if damaged checkpoints were skipped on resume.
    """

    settings: Settings
    spec: JobSpec
    run_spec: RunSpec
    world: World
    network: Network
    dataset: Dataset
    backend: Backend
    plan: Plan
    replica: Replica
    buckets: tuple[Bucket, ...]
    recorder: StepRecorder
    engine: Engine
    schedule: Schedule
    augmentation: Augmentation | None
    cached_images: NDArray[np.float32] | None
    run: RunDirectory | None
    first_step: int
    warning: str | None = None

    @property
    def memory_bytes(self) -> dict[str, int]:
        """Memory of this rank in bytes, by purpose."""
        buffers = self.engine.gradient_sum.memory_bytes
        return {**self.replica.memory_bytes, **({"sums": buffers} if buffers else {})}

    @property
    def local_batch(self) -> int:
        """Largest shard of a minibatch that a rank processes."""
        return self.plan.batch_size

    def reopen_engine(self) -> None:
        """Replace the engine by a new one, after the present one was closed."""
        self.engine = _engine(self.spec, self.world, self.replica, self.buckets, self.recorder)


def assemble(
    chosen: Settings,
    world: World,
    *,
    network: Network | None = None,
    dataset: Dataset | None = None,
    keeps_run: bool = True,
    recorded_steps: int = 2048,
) -> Job:
    """Agree on the job, open the data and the run directory, plan, compile and share parameters.

    Args:
        chosen: settings with the recipe of the network filled in.
        world: the ranks; every rank calls this function.
        network: the network; loaded from the settings if it is None.
        dataset: the data set; opened from the settings if it is None.
        keeps_run: True if there is a run directory to write or to continue.
        recorded_steps: number of steps whose times are kept, the last ones.

    Raises:
        UserError: a mistake of the user, or a difference between the ranks; on every rank.
    """
    agree(world, job_settings(chosen))
    backend = open_backend(chosen, world)
    network = network or call_on_all_ranks(world, chosen.load_network)
    dataset = dataset or _open_data(chosen, network, world)
    description = network_to_dict(network)
    data, preprocessing = data_fingerprint(dataset), dataset.preprocessing.to_dict()
    agree(world, {"network": digest(description), **_named("data", data)})
    threads = compute_threads(chosen, world)
    precision = chosen.precision or next(iter(backend.precisions))
    plan = call_on_all_ranks(
        world,
        lambda: make_plan(
            network,
            backend,
            max(math.ceil(chosen.batch_size / world.size), 1),
            precision=precision,
            optimizer=chosen.update_rule(),
            threads=threads,
        ),
    )
    call_on_all_ranks(world, lambda: check_memory(backend, plan, len(dataset.train), world))
    augmentation = call_on_all_ranks(world, lambda: make_augmentation(chosen))
    if augmentation is not None:
        augmentation.check(network.input_shape)
    epoch_steps = steps_per_epoch(len(dataset.train), chosen.batch_size)
    schedule = call_on_all_ranks(world, lambda: make_schedule(chosen, epoch_steps))
    run = (
        call_on_rank_zero(world, lambda: open_run(chosen, network, dataset)) if keeps_run else None
    )
    replica = make_replica(world, backend, plan, chosen.seed)
    images = _cached_images(replica, dataset.train, augmentation, world, chosen.share_gpus)
    if images is not None:
        assert isinstance(replica, DeviceReplica)
        replica.cache_images(images)
    transport = find_transport(chosen, world, replica)
    bucket_size = bucket_bytes(chosen, world, transport)
    spec = resolve_job(
        chosen,
        ranks=world.size,
        epoch_steps=epoch_steps,
        precision=precision,
        prefetch=0 if images is not None else choose_prefetch(
            chosen, dataset.train, world, threads
        ),
        transport=transport,
        bucket_kib=(bucket_size or 0) // 1024,
    )  # fmt: skip
    run_spec = RunSpec(
        version=__version__,
        job=spec,
        network=description,
        data=data,
        preprocessing=preprocessing,
        ranks=describe_ranks(world, replica, plan),
        origins=dict(chosen.origins),
    )
    agree(world, {"specification": run_spec.digest})
    restored = call_on_rank_zero(world, lambda: restore_run(chosen, spec, run, replica))
    first_step = int(world.broadcast_json(restored.step if restored is not None else 0))
    share_state(world, replica)
    if run is not None:
        start_run(run, chosen, run_spec, network, world, first_step)
    buckets = make_buckets(plan, bucket_size)
    recorder = StepRecorder(plan.stages, recorded_steps)
    return Job(
        settings=chosen,
        spec=spec,
        run_spec=run_spec,
        world=world,
        network=network,
        dataset=dataset,
        backend=backend,
        plan=plan,
        replica=replica,
        buckets=buckets,
        recorder=recorder,
        engine=_engine(spec, world, replica, buckets, recorder),
        schedule=schedule,
        augmentation=augmentation,
        cached_images=images,
        run=run,
        first_step=first_step,
        warning=None if restored is None else restored.warning,
    )


def _open_data(chosen: Settings, network: Network, world: World) -> Dataset:
    return call_on_all_ranks(
        world,
        lambda: open_data(
            str(chosen.data), network, seed=chosen.seed, ranks_per_node=world.local_size
        ),
    )


def _engine(
    spec: JobSpec,
    world: World,
    replica: Replica,
    buckets: tuple[Bucket, ...],
    recorder: StepRecorder,
) -> Engine:
    gradient_sum = call_on_all_ranks(
        world, lambda: make_gradient_sum(spec.strategy, world, replica, buckets, spec.transport)
    )
    return make_engine(replica, gradient_sum, buckets, recorder)


def _named(prefix: str, values: dict[str, Any]) -> dict[str, Any]:
    return {f"{prefix} {name}": value for name, value in values.items()}


def _cached_images(
    replica: Replica,
    samples: Samples,
    augmentation: Augmentation | None,
    world: World,
    share_gpus: bool,
) -> NDArray[np.float32] | None:
    """Return the training images if every rank can cache them on its device, else None."""
    fits = isinstance(replica, DeviceReplica) and can_cache_on_device(samples, augmentation)
    if fits:
        assert isinstance(samples, CachedSamples)
        free = replica.backend.free_bytes()
        # Ranks that share a GPU may read its free memory at the same moment.
        users = world.local_size if share_gpus else 1
        fits = free is not None and samples.x.nbytes * users <= DEVICE_SHARE * free
    if not all(world.all_gather_json(bool(fits))):
        return None
    assert isinstance(samples, CachedSamples)
    return samples.x


def make_augmentation(chosen: Settings) -> Augmentation | None:
    """Return the augmentation of the training images; None if nothing is changed."""
    if not (chosen.crop or chosen.flip or chosen.brightness or chosen.contrast):
        return None
    return Augmentation(chosen.crop or 0, chosen.flip, chosen.brightness, chosen.contrast)


def make_schedule(chosen: Settings, epoch_steps: int) -> Schedule:
    """Return the learning-rate schedule."""
    return Schedule(
        kind=str(chosen.schedule),
        base=float(chosen.learning_rate or 0.0),
        warmup_steps=chosen.warmup_steps,
        total_steps=chosen.steps or (chosen.epochs or 0) * epoch_steps,
        step_every=chosen.step_every or 0,
        step_factor=chosen.step_factor,
    )
