"""Resources of the machine, cores and devices, and the settings that follow from them."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.backends import load_backend
from dptrain.backends.base import Backend
from dptrain.backends.canonical import CanonicalOrder
from dptrain.backends.flat_arrays import FlatArrays
from dptrain.backends.replica import Replica
from dptrain.comm.collective import call_on_all_ranks
from dptrain.comm.transport import BUCKET_BYTES, choose_transport
from dptrain.comm.world import AgreedError, World
from dptrain.data.base import Samples
from dptrain.data.stored import CachedSamples
from dptrain.errors import UserError
from dptrain.machine import (
    allowed_cores,
    available_cores,
    cpu_model,
    own_cores,
    physical_cores,
)
from dptrain.measure.console import ReplacedLine
from dptrain.memory import ADVICE, require_memory
from dptrain.plan.plan import Plan, require_shards
from dptrain.training.settings import SettingGroups, Settings
from dptrain.training.spec import RankSpec


def share_of_cores(world: World) -> tuple[int, int]:
    """Return the number of cores of this rank, and the number of ranks that share them.

    A launcher that binds ranks assigns cores to each of them. Without binding, all ranks of a node
    share its cores.
    """
    mine = [socket.gethostname(), sorted(own_cores())]
    ranks = world.all_gather_json(mine)
    return available_cores(), sum(1 for other in ranks if other == mine)


def node_facts(world: World, num_devices: int) -> dict[str, int]:
    """Return the size of the smallest node, the same on every rank.

    Args:
        world: the ranks of the job.
        num_devices: number of GPUs that this rank sees; 0 if it computes on cores.

    Returns:
        ``node_cores``, the number of cores that more ranks of the node could use, and
        ``node_gpus``.
    """
    cores = world.node_cores()
    if share_of_cores(world)[1] < world.local_size and cores == world.local_cores:
        # A launcher has bound ranks to cores of their own; it can bind more ranks to the others.
        cores = len(physical_cores(allowed_cores()))
    found = world.all_gather_json([cores, num_devices])
    return {"node_cores": min(c for c, _ in found), "node_gpus": min(g for _, g in found)}


def possible_efficiency(world: World, threads: int) -> float:
    """Return the largest weak efficiency that the cores allow if ranks and threads share them."""
    cores, sharing = share_of_cores(world)
    share = min(cores / (sharing * threads), 1.0)
    return float(min(world.all_gather_json(share)))


def compute_threads(chosen: SettingGroups[Any, None], world: World) -> int:
    """Return the number of compute threads of this rank."""
    cores, sharing = share_of_cores(world)
    return chosen.threads or max(cores // sharing, 1)


def open_backend(chosen: SettingGroups[Any, None], world: World) -> Backend:
    """Return the backend, with a device chosen for this rank.

    Raises:
        AgreedError: two ranks would use one device, and `share_gpus` is off.
    """
    backend = call_on_all_ranks(world, lambda: load_backend(chosen.backend))
    if chosen.shards:
        call_on_all_ranks(world, lambda: require_shards(backend))
    # Ranks of a node with the same backend divide its devices.
    before = world.node_all_gather_json(backend.name)[: world.local_rank]
    number = before.count(backend.name)
    device = call_on_all_ranks(world, lambda: backend.choose_device(number))
    devices = world.all_gather_json([socket.gethostname(), device])
    sharing = max(devices.count(other) if other[1] else 1 for other in devices)
    if sharing > 1 and not chosen.share_gpus:
        raise AgreedError(
            f"{sharing} ranks would use one GPU; start at most one rank per GPU on each node, or "
            "allow sharing with --share-gpus"
        )
    return backend


def describe_ranks(world: World, replica: Replica, plan: Plan) -> tuple[RankSpec, ...]:
    """Return the rank part of the run specification; every rank calls this function."""
    mine = {
        "rank": world.rank,
        "host": socket.gethostname(),
        "processor": cpu_model(),
        "device": replica.memory.name or "cpu",
        "backend": replica.backend.name,
        "precision": plan.precision,
        "threads": plan.setting.threads,
        "cores": available_cores(),
    }
    return tuple(RankSpec(**values) for values in world.all_gather_json(mine))


def choose_prefetch(chosen: Settings, samples: Samples, world: World, threads: int) -> int:
    """Return the number of minibatches that a thread reads ahead; the same on every rank.

    If every core computes, such a thread takes as much time from the computation as it saves. It
    pays only if it waits for files.
    """
    if chosen.prefetch is not None:
        return chosen.prefetch
    cores, sharing = share_of_cores(world)
    has_spare_core = cores > sharing * threads
    reads_files = not isinstance(samples, CachedSamples)
    return 2 if any(world.all_gather_json(has_spare_core or reads_files)) else 0


def open_shared_arrays(
    chosen: Settings, world: World, backend: Backend, plan: Plan, *, mixed: bool = False
) -> FlatArrays | None:
    """Return flat arrays in memory that the ranks of a node share; None if MPI sums gradients.

    Args:
        chosen, world, backend, plan: of the job.
        mixed: True if ranks have different backends, whose flat arrays have different orders.

    Raises:
        AgreedError: shared memory was requested by name and is not available; on every rank.
    """
    if mixed or backend.free_bytes() is not None or chosen.transport not in ("auto", "shared"):
        return None
    if chosen.strategy == "central" or world.size == 1:
        return None  # `find_transport` refuses the strategy if shared memory was requested.
    try:
        if plan.micro_shards is not None and not world.nodes().are_consecutive():
            raise AgreedError(
                "with --shards, only nodes with consecutive ranks can sum in shared memory; start "
                "the ranks node by node, for example with --map-by slot"
            )
        from dptrain.comm.sums.shared import share_arrays

        return share_arrays(world, plan)
    except AgreedError as error:
        if chosen.transport == "shared":
            raise AgreedError(f"{error}; use --transport mpi") from None
        if world.is_rank_zero:
            print(f"dptrain: {error}; MPI sums the gradients instead", file=sys.stderr)
        return None


def find_transport(chosen: Settings, world: World, replica: Replica) -> str:
    """Return how gradients are transferred between the ranks."""
    return call_on_all_ranks(
        world,
        lambda: choose_transport(world, replica, chosen.transport, strategy=chosen.strategy),
    )


def bucket_bytes(
    chosen: SettingGroups[Any, None], world: World, transport: str, *, on_gpu: bool = False
) -> int:
    """Return the smallest size of a gradient bucket; 0 if the gradient is one bucket.

    Overlap pays if a network or GPUs carry the sums. Within a node the cores that compute also copy
    and add, and one large message keeps the numbers in cache: an all-reduce of 0.8 MB on 2 ranks
    takes 270 µs as a whole and 390 µs in buckets between stages (AMD EPYC, 2 cores, MPICH 5.0.2).
    """
    if chosen.bucket_kib is not None:
        return chosen.bucket_kib * 1024
    if on_gpu and transport in BUCKET_BYTES:
        return BUCKET_BYTES[transport]
    return 0 if world.local_size == world.size else 256 * 1024


DIGEST_EVERY = 100
"""Steps between two checks of the state on CPUs."""


def choose_digest_every(chosen: SettingGroups[Any, None], replica: Replica) -> int:
    """Return the number of steps between two checks of the state; 0 checks nothing."""
    if chosen.digest_every is not None:
        return int(chosen.digest_every)
    return 0 if replica.memory.on_gpu else DIGEST_EVERY


REPLAY_EVERY = 100
"""Steps between two replays of micro-shards on CPUs."""


def choose_replay_every(
    chosen: SettingGroups[Any, None], replica: Replica, *, mixed: bool = False
) -> int:
    """Return the number of steps between two replays; 0 makes none.

    Args:
        chosen: the settings.
        replica: of this rank.
        mixed: True if ranks have different backends, whose gradients have other bits.

    Raises:
        UserError: replays were requested, and are not possible.
    """
    can = bool(chosen.shards) and not mixed and not replica.memory.asynchronous
    every = chosen.replay_every
    if every and not can:
        reason = (
            "there are no micro-shards; add --shards, with at least one for each rank, or remove it"
            if not chosen.shards
            else f"{'backends of ranks differ' if mixed else 'a GPU computes'}; remove it"
        )
        raise UserError(f"--replay-every is {every}, but {reason}")
    return (REPLAY_EVERY if can else 0) if every is None else int(every)


ORDER_BYTES = 24
"""Memory per sample while the order of an epoch is sorted: random numbers, indices, workspace."""


def check_memory(backend: Backend, plan: Plan, num_samples: int, world: World) -> None:
    """Refuse a job that does not fit into memory, before anything large is allocated."""
    ranks = world.local_size
    node = "" if ranks == 1 else f" on each of {ranks} ranks of this machine"
    require_memory(ranks * ORDER_BYTES * num_samples, f"the order of {num_samples:,} samples{node}")
    if backend.free_bytes() is None:
        purpose = f"{plan.network.name} with {plan.batch_size:,} samples in a minibatch{node}"
        advice = ADVICE if plan.setting.recompute else f"{ADVICE}, or --recompute"
        require_memory(ranks * sum(plan.memory.values()), purpose, advice)


COMPILING = "compiling kernels; the first run of a network on a machine takes longer"
COMPILATION_TIMEOUT_S = 3600.0
"""Longest wait for the ranks that compile. On a machine that others use, it took over 5 minutes."""

NOTICE_AFTER_S = 2.0
UPDATE_EVERY_S = 1.0
"""Seconds between two states of a line that is replaced on a terminal."""
PROGRESS_AFTER_S, MOST_PROGRESS_S = 5.0, 60.0
"""Seconds until the first line of the progress without a terminal, and the longest interval between
two lines: each interval is twice the one before."""


@contextmanager
def notice_if_slow(
    text: str, progress: Callable[[], tuple[int, int]] = lambda: (0, 0)
) -> Iterator[None]:
    """Print a line on standard error if the block takes more than two seconds.

    Args:
        text: the line; empty prints nothing.
        progress: returns the number of compiled kernels and of all, which are then shown with the
            time: on a terminal in one line that is replaced every second, else in a new line after
            5, 10, 20, … s; (0, 0) shows nothing.
    """
    if not text:
        yield
        return
    has_ended, start = threading.Event(), time.monotonic()
    line = ReplacedLine()

    def report() -> None:
        if has_ended.wait(NOTICE_AFTER_S):
            return
        print(f"dptrain: {text}", file=sys.stderr)
        wait_s = UPDATE_EVERY_S if line.is_replaced else PROGRESS_AFTER_S
        while not has_ended.wait(wait_s):
            done, count = progress()
            if count:
                current, time_s = min(done + 1, count), time.monotonic() - start
                line.show(f"dptrain: compiling {current} of {count} kernels, {time_s:.0f} s")
            wait_s = wait_s if line.is_replaced else min(2 * wait_s, MOST_PROGRESS_S)
        line.end()

    thread = threading.Thread(target=report, name="dptrain-notice", daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        if line.is_replaced:  # What is printed next begins in an empty line.
            thread.join(UPDATE_EVERY_S)


def compile_kernels(world: World, backend: Backend, *, quiet: bool = False) -> None:
    """Compile the kernels that were bound; the ranks of a node divide the work.

    Args:
        world: the ranks; every rank calls this function.
        backend: of this rank.
        quiet: True prints nothing if this takes long.
    """
    notice = "" if quiet or not world.is_rank_zero else COMPILING
    with notice_if_slow(notice, backend.compilation_progress):
        backend.compile_kernels(max(1, world.node_cores() // world.local_size))
        world.node_barrier(COMPILATION_TIMEOUT_S)


def share_state(world: World, replica: Replica, root: int = 0, *, mixed: bool = False) -> None:
    """Copy the state of rank `root` to every rank, and verify that the ranks agree.

    The state consists of parameters, optimizer state, running statistics and the number of updates.

    Args:
        world: the ranks; every rank calls this function.
        replica: of this rank.
        root: the rank.
        mixed: True if ranks have different backends, whose flat arrays have different orders.
    """
    count = np.array([replica.updates], np.int64)
    world.broadcast(count, root)
    replica.updates = int(count[0])
    if world.size == 1:
        return
    for flat in (replica.flat_parameters, *replica.flat_state.values()):
        if mixed:
            _broadcast_canonical(world, replica, flat, root)
        else:
            broadcast_flat(world, replica, flat, root)
    world.node_barrier()
    if not mixed:
        world.check_equal(replica.memory.download(replica.flat_parameters), "parameters")
    broadcast_statistics(world, replica, root)


def broadcast_flat(world: World, replica: Replica, flat: NDArray[Any], root: int = 0) -> None:
    """Overwrite a flat array of the replica with that of rank `root`.

    Ranks that share the array of another rank receive the values, too, but do not write them.
    """
    values = replica.memory.download(flat)
    if world.rank != root and not replica.owns_parameters:
        values = np.empty_like(values)
    world.broadcast(values, root)
    if replica.owns_parameters:
        replica.memory.upload(flat, values)


def _broadcast_canonical(world: World, replica: Replica, flat: NDArray[Any], root: int) -> None:
    """Overwrite a flat array with that of rank `root`, whose backend may have another order."""
    order, values = CanonicalOrder(replica.plan.layout), replica.memory.download(flat)
    canonical = np.zeros(order.size, values.dtype)
    order.read(values, canonical)
    world.broadcast(canonical, root)
    order.write(values, canonical)
    replica.memory.upload(flat, values)


def broadcast_statistics(world: World, replica: Replica, root: int = 0) -> None:
    """Overwrite the running statistics of every rank with those of rank `root`."""
    if replica.statistics and world.size > 1:
        values = _read_statistics(replica)
        world.broadcast(values, root)
        _write_statistics(replica, values)
        world.check_equal(_read_statistics(replica), "running statistics")


def average_statistics(world: World, replica: Replica, num_samples: int) -> None:
    """Overwrite the running statistics of every rank with their means over the ranks.

    All ranks receive the same bits.

    Args:
        world: the ranks; every rank calls this function.
        replica: the replica of this rank.
        num_samples: samples of this rank in a minibatch, which weight its statistics. Those of a
            rank that has none are still the initial ones.
    """
    if replica.statistics and world.size > 1:
        own = _read_statistics(replica)
        # The rows of other ranks are zero, so the all-reduce rounds nothing.
        rows = np.zeros((world.size, own.size))
        rows[world.rank] = own
        world.all_reduce(rows)
        weights = world.all_gather_json(num_samples)
        means = np.average(rows, axis=0, weights=weights).astype(own.dtype)
        # Those of frozen layers are equal, and keep their bits.
        _write_statistics(replica, np.where((rows == own).all(axis=0), own, means))


def _read_statistics(replica: Replica) -> NDArray[Any]:
    """Return all running statistics, one after the other."""
    return np.concatenate([values.reshape(-1) for values in replica.statistics.values()])


def _write_statistics(replica: Replica, values: NDArray[Any]) -> None:
    """Overwrite all running statistics."""
    start = 0
    for name, old in replica.statistics.items():
        replica.statistics[name] = values[start : start + old.size].reshape(old.shape)
        start += old.size
