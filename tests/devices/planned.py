"""A device that computes nothing and records its launches, for plans for GPUs that are not here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from dptrain.backends.cuda.backend import CudaBackend
from dptrain.backends.cuda.device.device import Array, Device, Extent, Function
from dptrain.network.network import Network
from dptrain.plan.limits import DeviceLimits
from dptrain.plan.plan import make_plan
from dptrain.plan.shards import MicroShards
from tests.emulator.emulator import check_launch


class Launch(NamedTuple):
    """A launch of a kernel: its source, name, macros, and shared memory in bytes."""

    file: str
    name: str
    defines: tuple[tuple[str, int], ...]
    grid: Extent
    block: Extent
    shared_bytes: int


class PlannedDevice(Device):
    """A GPU that only checks its launches.

    Args:
        limits: of the GPU.

    Attributes:
        launches: all launches so far.
    """

    def __init__(self, limits: DeviceLimits) -> None:
        self.limits, self.launches = limits, list[Launch]()

    @property
    def free_bytes(self) -> int:
        return 1 << 40

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        # The system provides memory when it is written first, so unused memory has no cost.
        return np.zeros(shape, dtype)

    def upload(self, target: Array, source: NDArray[Any]) -> None:
        pass

    def download(self, source: Array, out: NDArray[Any] | None = None) -> NDArray[Any]:
        return np.zeros(source.shape, source.dtype) if out is None else out

    def synchronize(self) -> None:
        pass

    def address(self, array: Array) -> int:
        return int(array.ctypes.data)

    def function(self, file: str, name: str, **defines: int) -> Function:
        def run(grid: Extent, block: Extent, args: Sequence[Any], *, shared_bytes: int = 0) -> None:
            check_launch(grid, block, shared_bytes, self.limits)
            macros = tuple(sorted(defines.items()))
            self.launches.append(Launch(file, name, macros, grid, block, shared_bytes))

        return run


def step_launches(
    network: Network, limits: DeviceLimits, batch_size: int, precision: str,
    micro_shards: MicroShards | None = None,
) -> list[Launch]:  # fmt: skip
    """Return the launches of a training step.

    Args:
        network, precision: of the plan.
        limits: of the GPU.
        batch_size: of a minibatch of all ranks.
        micro_shards: of a rank; None for one rank without any.

    Raises:
        EmulatorError: the GPU would refuse one of them.
    """
    device = PlannedDevice(limits)
    backend = CudaBackend(device)
    n = batch_size if micro_shards is None else micro_shards.num_samples(batch_size)
    plan = make_plan(network, backend, n, precision=precision, micro_shards=micro_shards)
    replica = backend.allocate(plan, seed=0)
    x = np.zeros((n, *network.input_shape), np.float32)
    shape = (n,) if network.loss.targets == "classes" else (n, network.num_outputs)
    replica.forward_backward(x, np.zeros(shape, np.float32), global_count=batch_size)
    replica.update(0.1)
    return device.launches
