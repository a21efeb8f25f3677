"""Sums over GPUs by NCCL, enqueued behind the stages, beside those that follow.

Source: NVIDIA NCCL user guide, https://docs.nvidia.com/deeplearning/nccl.
"""

from __future__ import annotations

import faulthandler
from typing import Any, ClassVar

from dptrain.backends.base import Replica
from dptrain.backends.cuda.device import SUMS, Device
from dptrain.comm.base import GradientSum
from dptrain.comm.world import World
from dptrain.errors import UserError
from dptrain.plan.buckets import Bucket


class NcclSum(GradientSum):
    """g ← Σ_r g_r on every rank, by one all-reduce a bucket, in the memory of the GPUs."""

    name: ClassVar[str] = "mirrored"
    transport: ClassVar[str] = "nccl"
    enqueues: ClassVar[bool] = True

    def __init__(self, world: World, replica: Replica, buckets: tuple[Bucket, ...]) -> None:
        super().__init__(world, replica, buckets)
        assert isinstance(replica.memory, Device)
        self.device = replica.memory
        self.nccl = import_nccl()
        self.communicator = connect(world, self.nccl)

    def close(self) -> None:
        # Waits for graphs that were captured with it, for ever if there are any left.
        self.device.synchronize()
        self.communicator.destroy()

    def stamp(self, place: int) -> None:
        with self.device.beside(SUMS):
            self.replica.stamp(place)

    def _first_under_way(self) -> int | None:
        return None

    def _do_start(self, bucket: int) -> None:
        gradients = self.replica.flat_gradients
        part = gradients[self.buckets[bucket].start : self.buckets[bucket].stop]
        self.bytes += part.nbytes
        with self.device.beside(SUMS):
            self._sum(part)

    def _sum(self, array: Any) -> None:
        """Enqueue the sum of an array over all ranks; counts are elements."""
        address = self.device.address(array)
        self.communicator.allReduce(
            address, address, array.size,
            self.nccl.NCCL_FLOAT32, self.nccl.NCCL_SUM, self.device.stream_address,
        )  # fmt: skip

    def _do_poll(self) -> None:
        pass

    def _do_finish(self) -> None:
        self.device.join()


class NcclCentralSum(NcclSum):
    """g ← Σ_r g_r on rank 0, which updates and hands the parameters out, all by NCCL.

    The few shared sums behind the slots go to every rank.
    """

    name: ClassVar[str] = "central"

    def _do_start(self, bucket: int) -> None:
        start, stop = self.buckets[bucket].start, self.buckets[bucket].stop
        size, gradients = self.replica.plan.layout.size, self.replica.flat_gradients
        part = gradients[start : min(stop, size)]
        address = self.device.address(part)
        self.bytes += part.nbytes
        with self.device.beside(SUMS):
            self.communicator.reduce(
                address, address, part.size,
                self.nccl.NCCL_FLOAT32, self.nccl.NCCL_SUM, 0, self.device.stream_address,
            )  # fmt: skip
            if stop > size:
                self._sum(gradients[size:])

    def update(self, learning_rate: float) -> None:
        if self.world.is_main:
            self._update_here(learning_rate)
        else:
            self.replica.updates += 1
        self._hand_out()

    def apply_update(self) -> None:
        if self.world.is_main:
            super().apply_update()
        self._hand_out()

    def _hand_out(self) -> None:
        parameters = self.replica.flat_parameters
        self.communicator.broadcast(
            self.device.address(parameters), self.device.address(parameters), parameters.size,
            self.nccl.NCCL_FLOAT32, 0, self.device.stream_address,
        )  # fmt: skip


def import_nccl() -> Any:
    """CuPy's binding of NCCL.

    Raises:
        UserError: it is not there, or finds no library.
    """
    try:
        from cupy.cuda import nccl

        nccl.get_version()
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"NCCL cannot be used ({reason}); pip install 'dptrain[cuda13]' or 'dptrain[cuda12]' "
            "brings it, --transport host sums through the host's memory"
        ) from None
    return nccl


def connect(world: World, nccl: Any) -> Any:
    """One communicator of all ranks.

    The call waits for all ranks and holds the interpreter's lock, so a watch of its own ends the
    process if they do not come.
    """
    number = world.broadcast_json(list(nccl.get_unique_id()) if world.is_main else None)
    world.barrier()
    faulthandler.dump_traceback_later(world.timeout, exit=True)
    try:
        return nccl.NcclCommunicator(world.size, bytes(number), world.rank)
    finally:
        faulthandler.cancel_dump_traceback_later()
