"""Sums over GPUs by NCCL, NVIDIA's library of collectives.

Source: NVIDIA NCCL user guide, https://docs.nvidia.com/deeplearning/nccl.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, ClassVar

from dptrain.backends.cuda.device.device import Array, Device
from dptrain.backends.device_replica import SummedStatistics
from dptrain.backends.replica import Replica
from dptrain.comm.job import current_job
from dptrain.comm.sums.enqueued import Carrier, Shared
from dptrain.comm.world import World
from dptrain.errors import UserError


class Nccl(Carrier):
    """A communicator of all ranks, for any array. NCCL decides the order of summation."""

    transport: ClassVar[str] = "nccl"

    def __init__(self, world: World, replica: Replica, shared: Shared) -> None:
        assert isinstance(replica.memory, Device)
        self.device = replica.memory
        self.nccl = import_nccl()
        self.communicator = connect(world, self.nccl)

    def all_reduce(self, array: Array) -> None:
        self._sum(array, self.nccl.NCCL_FLOAT32)

    def _sum(self, array: Array, kind: int) -> None:
        address = self.device.address(array)
        self.communicator.allReduce(
            address, address, array.size, kind, self.nccl.NCCL_SUM, self.device.stream_address
        )

    def reduce(self, array: Array) -> None:
        address = self.device.address(array)
        self.communicator.reduce(
            address,
            address,
            array.size,
            self.nccl.NCCL_FLOAT32,
            self.nccl.NCCL_SUM,
            0,
            self.device.stream_address,
        )

    def broadcast(self, array: Array) -> None:
        address = self.device.address(array)
        self.communicator.broadcast(
            address,
            address,
            array.size,
            self.nccl.NCCL_FLOAT32,
            0,
            self.device.stream_address,
        )

    def sum_statistics(self, statistics: SummedStatistics) -> None:
        self._sum(statistics.array, self.nccl.NCCL_FLOAT64)

    def close(self) -> None:
        # This waits forever if a graph that was captured with the communicator still exists.
        self.communicator.destroy()


def import_nccl() -> Any:
    """Return CuPy's binding of NCCL.

    Raises:
        UserError: the binding is not installed, or does not find the library.
    """
    try:
        from cupy.cuda import nccl

        nccl.get_version()
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"NCCL cannot be used ({reason}); install it with pip install '.[cuda13]' or "
            "'.[cuda12]', or use --transport host"
        ) from None
    return nccl


def connect(world: World, nccl: Any) -> Any:
    """Return a communicator of all ranks; every rank calls this function.

    NCCL waits for all ranks without limit and holds the interpreter's lock, so the watchdog of the
    node ends this process if a rank does not arrive within the world's timeout.
    """
    identifier = world.broadcast_json(list(nccl.get_unique_id()) if world.is_rank_zero else None)
    world.barrier()
    job = current_job()
    with nullcontext() if job is None else job.limit_call("NCCL to connect", world.timeout):
        return nccl.NcclCommunicator(world.size, bytes(identifier), world.rank)
