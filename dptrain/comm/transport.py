"""How the gradients of GPUs travel: by their own stores, by NCCL, by MPI, or through the host."""

from __future__ import annotations

import ctypes
import socket
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from dptrain.comm.peer import peer_error
from dptrain.errors import UserError

if TYPE_CHECKING:
    from dptrain.backends.replica import Replica
    from dptrain.comm.world import World

BUCKET_BYTES = {"peer": 256 << 10, "nccl": 1 << 20, "mpi": 1 << 20}
"""Least size of a bucket that GPUs sum by each transport. A sum by NCCL takes some 10 µs, however
small, one by kernels of ours 3 to 4."""

PEER_BYTES = 64 << 20
"""Gradients up to here are summed by kernels of ours unless something else is asked for: inboxes
take four times as much, and what is gained gets less."""


def choose_transport(world: World, replica: Replica, wanted: str = "auto") -> str:
    """What carries gradients, the same on every rank: ``peer``, ``nccl``, ``mpi`` or ``host``.

    Args:
        world: the ranks.
        replica: whose gradients they are.
        wanted: one of `dptrain.comm.TRANSPORTS`.

    Raises:
        UserError: what was asked for by name cannot be had; the same on every rank.
    """
    gpus = all(world.all_gather_json(replica.memory.on_gpu))
    if wanted == "host" or (wanted == "auto" and not gpus):
        return "host"
    if not gpus:
        raise UserError(f"--transport {wanted} is between GPUs, which this backend does not use")
    small = replica.flat_gradients.nbytes <= PEER_BYTES
    if wanted == "peer" or (wanted == "auto" and small):
        error = peer_error(world, replica)
        if error is None:
            return "peer"
        if wanted == "peer":
            raise UserError(error)
    if wanted in ("auto", "nccl"):
        error = _nccl_error(world, replica)
        if error is None:
            return "nccl"
        if wanted == "nccl":
            raise UserError(error)
    if understands_gpus(world, replica):
        return "mpi"
    if wanted == "mpi":
        raise UserError(
            "this MPI library does not say that it takes addresses of GPU memory; use one built "
            "with CUDA, or --transport nccl or host"
        )
    return "host"


def _nccl_error(world: World, replica: Replica) -> str | None:
    """Why NCCL cannot be used, if on any rank it cannot."""
    from dptrain.comm import nccl

    error = None
    try:
        nccl.import_nccl()
    except UserError as caught:
        error = str(caught)
    errors = [e for e in world.all_gather_json(error) if e is not None]
    if errors:
        return str(errors[0])
    places = world.all_gather_json([socket.gethostname(), replica.memory.identity])
    if any(places.count(place) > 1 for place in places):
        return "NCCL needs a GPU for every rank; ranks that share one sum with --transport host"
    return None


def understands_gpus(world: World, replica: Replica) -> bool:
    """Whether MPI takes addresses of GPU memory: it says so on every rank, and a sum is right.

    Source: ``MPIX_Query_cuda_support`` of Open MPI and of MPICH. A library that does not know such
    addresses would end the process, so none is tried that does not say so.
    """
    says = False
    with suppress(OSError, AttributeError):
        says = ctypes.CDLL(None).MPIX_Query_cuda_support() == 1
    if not all(world.all_gather_json(says)) or world.comm is None:
        return False
    memory = replica.memory
    array = memory.zeros((2,), "float32")
    memory.upload(array, np.array([1.0, world.rank], np.float32))
    memory.synchronize()
    from dptrain.comm.mpi import sum_in_place

    sum_in_place(world, array, "a sum that shows what MPI can do")
    expected = [world.size, world.size * (world.size - 1) / 2]
    return all(world.all_gather_json(memory.download(array).tolist() == expected))
