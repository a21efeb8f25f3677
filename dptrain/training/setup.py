"""From a configuration to a job that is ready to step, the same on every rank."""

from __future__ import annotations

import dataclasses
import math
import os
import socket
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.backends import load_backend
from dptrain.backends.base import Backend
from dptrain.backends.device_replica import DeviceReplica
from dptrain.backends.replica import Replica
from dptrain.comm import make_gradient_sum
from dptrain.comm.collective import call_on_all_ranks, call_on_rank_zero
from dptrain.comm.transport import BUCKET_BYTES, choose_transport
from dptrain.comm.world import AgreedError, World
from dptrain.data import Dataset, open_data
from dptrain.data.augmentation import Augmentation
from dptrain.data.base import Samples
from dptrain.data.loader import can_be_kept
from dptrain.data.sharding import steps_per_epoch
from dptrain.data.stored import MemorySamples
from dptrain.machine import available_cores
from dptrain.measure.environment import environment
from dptrain.measure.recorder import StepRecorder
from dptrain.memory import require_memory
from dptrain.network.network import Network
from dptrain.plan.buckets import make_buckets
from dptrain.plan.plan import Plan, make_plan
from dptrain.training.checkpoints import (
    Checkpoint,
    CheckpointFacts,
    replica_arrays,
    restore_replica,
)
from dptrain.training.engines import Engine, make_engine
from dptrain.training.rundir import RunDirectory
from dptrain.training.schedules import Schedule
from dptrain.training.settings import Settings


@dataclass(frozen=True)
class Job:
    """Everything that a training loop needs.

    Attributes:
        config: resolved: nothing is left for a default to decide.
        local_batch: largest share of a minibatch that a rank gets.
        prefetch: minibatches that a thread reads ahead; 0: none does.
        pictures: of the training split, where replicas keep them and are told places alone.
        run: where results go; None except on rank 0.
        first_step: number of the step to begin with; more than 0 after a resume.
        last_step: one past the last step.
        epoch_steps: steps an epoch.
        notes: what a user should know about the checkpoint that the run goes on from.
    """

    config: Settings
    world: World
    network: Network
    dataset: Dataset
    backend: Backend
    plan: Plan
    replica: Replica
    recorder: StepRecorder
    engine: Engine
    schedule: Schedule
    augmentation: Augmentation | None
    prefetch: int
    pictures: NDArray[np.float32] | None
    run: RunDirectory | None
    first_step: int
    last_step: int
    epoch_steps: int
    notes: tuple[str, ...] = ()

    @property
    def memory_bytes(self) -> dict[str, int]:
        """Of this rank, by purpose."""
        sums = self.engine.gradient_sum.memory_bytes
        return {**self.replica.memory_bytes, **({"sums": sums} if sums else {})}

    @property
    def local_batch(self) -> int:
        """Largest share of a minibatch that a rank gets."""
        return self.plan.batch_size


def share_of_cores(world: World) -> tuple[int, int]:
    """Cores that this rank may use, and how many ranks may use the same ones.

    A launcher that binds ranks gives each its own cores; one that does not lets all ranks of a
    node share them.
    """
    mine = [socket.gethostname(), sorted(os.sched_getaffinity(0))]
    everybody = world.all_gather_json(mine)
    return available_cores(), sum(1 for other in everybody if other == mine)


def possible_efficiency(world: World, threads: int) -> float:
    """Weak efficiency that the cores allow where ranks and their threads share them."""
    cores, sharing = share_of_cores(world)
    share = min(cores / (sharing * threads), 1.0)
    return float(min(world.all_gather_json(share)))


def resolve(config: Settings, backend: Backend, world: World) -> Settings:
    """Fill in what the configuration leaves to the backend and to the machine."""
    cores, sharing = share_of_cores(world)
    return dataclasses.replace(
        config,
        threads=config.threads or max(cores // sharing, 1),
        precision=config.precision or next(iter(backend.precisions)),
    )


def open_backend(config: Settings, world: World) -> Backend:
    """The backend, with a device chosen for this rank and, unless allowed, for no other."""
    backend = call_on_all_ranks(world, lambda: load_backend(config.backend))
    device = call_on_all_ranks(world, lambda: backend.place(world.local_rank))
    places = world.all_gather_json([socket.gethostname(), device])
    sharing = max(places.count(place) for place in places)
    if device and sharing > 1 and not config.share_gpus:
        raise AgreedError(
            f"{sharing} ranks would use one GPU; start as many ranks on a node as it has GPUs, or "
            "let ranks share with --share-gpus"
        )
    return backend


def read_ahead(config: Settings, samples: Samples, world: World) -> int:
    """Minibatches that a thread reads ahead of time.

    Where every core computes, such a thread takes as much from the computation as it saves, and
    more where it interrupts it; only waiting for files is worth it. The same on every rank.
    """
    if config.prefetch is not None:
        return config.prefetch
    cores, sharing = share_of_cores(world)
    spare = cores > sharing * int(config.threads or 1)
    return 2 if any(world.all_gather_json(spare or not isinstance(samples, MemorySamples))) else 0


def find_transport(config: Settings, world: World, replica: Replica) -> str:
    """Return how gradients are transferred; one rank's are not transferred."""
    return call_on_all_ranks(
        world,
        lambda: choose_transport(world, replica, str(config.transport), strategy=config.strategy),
    )


def bucket_bytes(config: Settings, world: World, transport: str) -> int | None:
    """Least size of a bucket; None: the gradient is summed as a whole.

    Overlap gains where a network or GPUs carry the sums. Within a node computing cores copy and add
    themselves, and do so in less time at one go, while the numbers are in their caches: 0.8 MB,
    2 ranks: 270 µs, against 390 µs with a bucket at work between stages.
    """
    if config.bucket_kib is not None:
        return config.bucket_kib * 1024
    if transport in BUCKET_BYTES:
        return BUCKET_BYTES[transport]
    return None if world.local_size == world.size else 256 * 1024


def make_replica(world: World, backend: Backend, plan: Plan, seed: int) -> Replica:
    """Compile on one rank a node first, so that the others find the kernels in the cache."""
    if world.first_on_node():
        backend.prepare(plan)
    world.node_barrier()
    backend.prepare(plan)
    return backend.make_replica(plan, seed=seed)


def share_state(world: World, replica: Replica) -> None:
    """Parameters and optimizer state of rank 0 on every rank, verified equal."""
    count = np.array([replica.updates], np.int64)
    world.broadcast(count)
    replica.updates = int(count[0])
    for flat in (replica.flat_parameters, *replica.flat_state.values()):
        broadcast_flat(world, replica, flat)
    world.check_equal(replica.memory.download(replica.flat_parameters), "parameters")


def broadcast_flat(world: World, replica: Replica, flat: NDArray[Any]) -> None:
    """Overwrite a flat array of the replica with rank 0's."""
    values = replica.memory.download(flat)
    world.broadcast(values)
    replica.memory.upload(flat, values)


def set_up(
    config: Settings, world: World, *, keeps_run: bool = True, recorded_steps: int = 2048
) -> Job:
    """Open data and run directory, plan, compile, share parameters.

    Args:
        config: what to train and how.
        world: the ranks; every rank calls this.
        keeps_run: whether there is a run directory to write, or to go on from.
        recorded_steps: how many steps the recorder keeps, the last ones.

    Raises:
        UserError: the same on every rank.
    """
    backend = open_backend(config, world)
    threads = config.threads
    config = resolve(config, backend, world)
    network = call_on_all_ranks(world, config.load_network)
    dataset = call_on_all_ranks(
        world,
        lambda: open_data(
            str(config.data), network, seed=config.seed, ranks_per_node=world.local_size
        ),
    )
    plan = call_on_all_ranks(
        world,
        lambda: make_plan(
            network,
            backend,
            max(math.ceil(config.batch_size / world.size), 1),
            precision=str(config.precision),
            optimizer=config.update_rule(),
            threads=int(config.threads or 1),
        ),
    )
    call_on_all_ranks(world, lambda: _require_memory(backend, plan, len(dataset.train), world))
    epoch_steps = steps_per_epoch(len(dataset.train), config.batch_size)
    last_step = config.steps if config.steps is not None else (config.epochs or 1) * epoch_steps
    schedule = call_on_all_ranks(world, lambda: _schedule(config, last_step))
    augmentation = call_on_all_ranks(world, lambda: _augmentation(config))
    run = None
    if keeps_run:
        run = call_on_rank_zero(world, lambda: _run_directory(config, network, dataset))
    replica = make_replica(world, backend, plan, config.seed)
    pictures = _pictures(replica, dataset.train, augmentation, world, config.share_gpus)
    if pictures is not None:
        assert isinstance(replica, DeviceReplica)
        replica.cache_images(pictures)
    prefetch = 0 if pictures is not None else read_ahead(config, dataset.train, world)
    restored = call_on_rank_zero(world, lambda: _restore(config, run, replica, last_step))
    first_step = int(world.broadcast_json(restored.step if restored is not None else 0))
    share_state(world, replica)
    if run is not None:
        # A run that is resumed on another machine uses that machine's cores, unless the user set
        # the number of threads.
        _describe_run(run, dataclasses.replace(config, threads=threads), network, world, restored)
        if first_step < last_step:
            run.remove_summary()
    transport = find_transport(config, world, replica)
    buckets = make_buckets(plan, bucket_bytes(config, world, transport))
    recorder = StepRecorder(plan.stages, recorded_steps)
    gradient_sum = call_on_all_ranks(
        world, lambda: make_gradient_sum(config.strategy, world, replica, buckets, transport)
    )
    return Job(
        config=config,
        world=world,
        network=network,
        dataset=dataset,
        backend=backend,
        plan=plan,
        replica=replica,
        recorder=recorder,
        engine=make_engine(replica, gradient_sum, buckets, recorder),
        schedule=schedule,
        augmentation=augmentation,
        prefetch=prefetch,
        pictures=pictures,
        run=run,
        first_step=first_step,
        last_step=last_step,
        epoch_steps=epoch_steps,
        notes=() if restored is None else restored.notes,
    )


ORDER_BYTES = 24
"""Memory per sample while the order of an epoch is sorted: random numbers, indices, workspace."""


def _require_memory(backend: Backend, plan: Plan, num_samples: int, world: World) -> None:
    """Refuse a job that does not fit into memory before anything large is allocated."""
    ranks = world.local_size
    node = "" if ranks == 1 else f" on each of {ranks} ranks of this machine"
    require_memory(ranks * ORDER_BYTES * num_samples, f"the order of {num_samples:,} samples{node}")
    if backend.free_bytes() is None:
        purpose = f"{plan.network.name} with {plan.batch_size:,} samples in a minibatch{node}"
        require_memory(ranks * sum(plan.memory.values()), purpose)


DEVICE_SHARE = 0.5
"""Largest share of the device memory left by the replica that a data set may take there."""


def _pictures(
    replica: Replica,
    samples: Samples,
    augmentation: Augmentation | None,
    world: World,
    share_gpus: bool,
) -> NDArray[np.float32] | None:
    """Return the training images if every rank can cache them on its device, else None."""
    fits = isinstance(replica, DeviceReplica) and can_be_kept(samples, augmentation)
    if fits:
        assert isinstance(samples, MemorySamples)
        free = replica.backend.free_bytes()
        # Ranks that share a GPU may read its free memory at the same moment.
        users = world.local_size if share_gpus else 1
        fits = free is not None and samples.x.nbytes * users <= DEVICE_SHARE * free
    if not all(world.all_gather_json(bool(fits))):
        return None
    assert isinstance(samples, MemorySamples)
    return samples.x


def _augmentation(config: Settings) -> Augmentation | None:
    if not (config.crop or config.flip or config.brightness or config.contrast):
        return None
    return Augmentation(config.crop or 0, config.flip, config.brightness, config.contrast)


def _schedule(config: Settings, last_step: int) -> Schedule:
    return Schedule(
        kind=str(config.schedule),
        base=float(config.learning_rate or 0.0),
        warmup_steps=config.warmup_steps,
        total_steps=last_step,
        step_every=config.step_every or 0,
        step_factor=config.step_factor,
    )


def _run_directory(config: Settings, network: Network, dataset: Dataset) -> RunDirectory:
    keep = config.keep_checkpoints
    if config.resume is not None:
        run = RunDirectory.open(Path(config.resume), keep=keep)
        run.hold()
        return run
    path = None if config.run_dir is None else Path(config.run_dir)
    return RunDirectory.create(
        path, network=network.name, data=dataset.name, now=datetime.now(), keep=keep
    )


def _restore(
    config: Settings, run: RunDirectory | None, replica: Replica, last_step: int
) -> Checkpoint | None:
    if config.resume is None or run is None or not run.begun():
        return None
    checkpoint = run.checkpoints.load()
    checkpoint.run_facts.check_same_run(
        checkpoint.path,
        batch_size=config.batch_size,
        seed=config.seed,
        data=str(config.data),
        schedule=str(config.schedule),
        total_steps=last_step,
    )
    restore_replica(replica, checkpoint)
    return checkpoint


def _describe_run(
    run: RunDirectory,
    config: Settings,
    network: Network,
    world: World,
    restored: Checkpoint | None,
) -> None:
    values = config.to_toml_values()
    # First of all: a directory that holds anything but has no configuration is not taken for a run.
    run.write_config(values)
    if config.network.endswith(".toml"):
        run.write_config({**values, "network": run.keep_network(network)})
    run.metrics.truncate_after(0 if restored is None else restored.step)
    run.write_environment(environment(world))


def save_checkpoint(job: Job, step: int) -> Path | None:
    """Write the state after `step` steps; rank 0 does, the others go on."""
    if job.run is None:
        return None
    config = job.config
    facts = CheckpointFacts(
        updates=job.replica.updates,
        network=job.network.name,
        batch_size=config.batch_size,
        seed=config.seed,
        data=str(config.data),
        ranks=job.world.size,
        total_steps=job.last_step,
        schedule=str(config.schedule),
        spec=config.to_toml_values(),
        preprocessing=job.dataset.preprocessing.to_dict(),
    )
    return job.run.save_checkpoint(step, replica_arrays(job.replica), facts.to_mapping())
