"""The choice of a transport: shared memory, peer-to-peer memory, NCCL, MPI, or host memory."""

from __future__ import annotations

import ctypes
import socket
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from dptrain.errors import UserError
from dptrain.plan.shards import rank_contributions

if TYPE_CHECKING:
    from dptrain.backends.replica import Replica
    from dptrain.comm.world import World

BUCKET_BYTES = {"peer": 256 << 10, "nccl": 1 << 20, "mpi": 1 << 20}
"""Smallest bucket by transport. A sum by NCCL takes about 10 µs however small it is, one by the
peer-to-peer kernels 3 to 4 µs."""

PEER_BYTES = 64 << 20
"""``auto`` uses peer-to-peer memory for gradients up to this size: its buffers need four times as
much memory, and its advantage over NCCL decreases with size."""


def choose_transport(
    world: World, replica: Replica, wanted: str = "auto", *, strategy: str = "mirrored"
) -> str:
    """Return how gradients are transferred, the same on every rank.

    Args:
        world: the ranks; every rank calls this.
        replica: has the gradients.
        wanted: one of `dptrain.comm.TRANSPORTS`.
        strategy: one of `dptrain.comm.STRATEGIES`.

    Returns:
        ``shared``, ``peer``, ``nccl``, ``mpi`` or ``host``. On CPUs it is ``shared`` if the arrays
        of the replica are in shared memory, else ``mpi``.

    Raises:
        UserError: the transport that was requested by name is not available, or does not support
            the strategy; the same error on every rank.
    """
    gpus = all(world.all_gather_json(replica.memory.on_gpu))
    check_strategy(wanted, strategy, on_gpu=gpus)
    if not gpus:
        return _choose_on_cpu(replica, wanted)
    if wanted == "shared":
        raise UserError(
            "--transport shared sums gradients of ranks that compute on the CPU; use --transport "
            "auto, peer, nccl, mpi or host"
        )
    if wanted == "host" or world.size == 1:
        return "host"
    allowed = transports_in_order(world, replica)
    if wanted not in ("auto", *allowed):
        raise UserError(
            f"--transport {wanted} does not add these micro-shards along their tree; use "
            "--transport host with --shards, or as many micro-shards as ranks"
        )
    small = replica.flat_gradients.nbytes <= PEER_BYTES or "nccl" not in allowed
    if wanted == "peer" or (wanted == "auto" and small and "peer" in allowed):
        from dptrain.comm.sums.peer import peer_error

        error = peer_error(world, replica)
        if error is None:
            return "peer"
        if wanted == "peer":
            raise UserError(error)
    if wanted in ("auto", "nccl") and "nccl" in allowed:
        error = _nccl_error(world, replica)
        if error is None:
            return "nccl"
        if wanted == "nccl":
            raise UserError(error)
    if strategy != "central" and "mpi" in allowed and accepts_gpu_memory(world, replica):
        return "mpi"
    if wanted == "mpi":
        raise UserError(
            "this MPI library does not report support for GPU memory; use an MPI library built "
            "with CUDA, or --transport nccl or host"
        )
    return "host"


def transports_in_order(world: World, replica: Replica) -> tuple[str, ...]:
    """Return the transports between GPUs that add in an order that the plan allows.

    With micro-shards this is their tree. The kernels of peer-to-peer memory can follow it if each
    rank contributes one sum. NCCL adds in any order, which two ranks do not notice.
    """
    shards = replica.plan.micro_shards
    if shards is None:
        return "peer", "nccl", "mpi"
    contributions, _ = rank_contributions(shards.total, world.size, shards.counts)
    if max(contributions) > 1:
        return ()
    return ("peer", "nccl") if world.size == 2 else ("peer",)


def _choose_on_cpu(replica: Replica, wanted: str) -> str:
    if wanted in ("peer", "nccl"):
        raise UserError(
            f"--transport {wanted} transfers gradients between GPUs, but this backend computes on "
            "the CPU; use --transport auto, shared or mpi"
        )
    return "shared" if replica.arrays.is_shared and wanted in ("auto", "shared") else "mpi"


def check_strategy(transport: str, strategy: str, *, on_gpu: bool) -> None:
    """Raise a `UserError` if a transport does not support a strategy."""
    if strategy != "central":
        return
    if transport == "mpi" and on_gpu:
        raise UserError(
            "--transport mpi does not support --strategy central on GPUs; use --strategy mirrored, "
            "or --transport nccl or host"
        )
    if transport == "shared":
        raise UserError(
            "--transport shared does not support --strategy central; use --strategy mirrored, or "
            "--transport mpi"
        )


def _nccl_error(world: World, replica: Replica) -> str | None:
    """Return why NCCL is not available on some rank; None if it is."""
    from dptrain.comm.sums import nccl

    error = None
    try:
        nccl.import_nccl()
    except UserError as caught:
        error = str(caught)
    errors = [e for e in world.all_gather_json(error) if e is not None]
    if errors:
        return str(errors[0])
    devices = world.all_gather_json([socket.gethostname(), replica.memory.identity])
    if any(devices.count(device) > 1 for device in devices):
        return (
            "NCCL needs a GPU for every rank, but some ranks share one; use --transport host, or "
            "start one rank per GPU"
        )
    return None


def accepts_gpu_memory(world: World, replica: Replica) -> bool:
    """Return whether MPI accepts GPU addresses: every rank reports it, and a test sum is correct.

    A library that does not accept them would end the process, so the test sum is made only if the
    library reports support.

    Source: ``MPIX_Query_cuda_support`` of Open MPI and of MPICH.
    """
    reported = False
    with suppress(OSError, AttributeError):
        reported = ctypes.CDLL(None).MPIX_Query_cuda_support() == 1
    if not all(world.all_gather_json(reported)) or world.comm is None:
        return False
    memory = replica.memory
    array = memory.zeros((2,), "float32")
    memory.upload(array, np.array([1.0, world.rank], np.float32))
    memory.synchronize()
    from dptrain.comm.sums.mpi import sum_in_place

    sum_in_place(world, array, "a test sum in GPU memory")
    expected = [world.size, world.size * (world.size - 1) / 2]
    return all(world.all_gather_json(memory.download(array).tolist() == expected))
