"""Compare memory-bound kernels of the `cuda` backend with a copy of as many bytes.

    python3 -m benchmarks.gpu_kernels.gpu_memory [--batch N ...] [--precision P ...] [network ...]

Requires a GPU and CuPy. Each kernel of a training step is launched many times in one CUDA graph
with the arguments of the step. With large batches, launches alternate between the memory of several
replicas, so that L2 contains no more than in a step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import click
import numpy as np

from benchmarks.gpu_kernels.gpu_cases import Case, Times, takes_cases, timed
from dptrain.backends.cuda.backend import CudaBackend
from dptrain.backends.cuda.device.device import Device, Function
from dptrain.backends.cuda.device.launching import launch
from dptrain.backends.replica import Replica
from dptrain.plan import SGD
from dptrain.plan.plan import Stage, make_plan

NETWORKS = ("cifar", "solar", "model2")
REPLICAS = {32: 1, 2048: 3}
"""Numbers of replicas that launches alternate between, by batch size."""
FILES = {f"{name}.cu" for name in (
    "elementwise", "pooling", "normalization", "dropout", "losses", "optimizers"
)}  # fmt: skip
LAUNCHES = 120
"""Launches in a graph, so many that its start is negligible."""
REPEATS = 15
"""Number of timed graph launches."""


@dataclass(frozen=True)
class Launch:
    """A kernel launch of a step."""

    file: str
    name: str
    start: Callable[[], None]
    nbytes: int


class Recorder:
    """Record the launches of a device.

    Args:
        device: the recorded device.
    """

    def __init__(self, device: Device) -> None:
        self.launches: list[Launch] = []
        self._function = device.function
        device.function = self._recorded  # type: ignore[method-assign]

    def _recorded(self, file: str, name: str, **defines: int | str) -> Function:
        function = self._function(file, name, **defines)

        def run(grid: Any, block: Any, args: Sequence[Any], *, shared_bytes: int = 0) -> None:
            args = list(args)

            def start() -> None:
                function(grid, block, args, shared_bytes=shared_bytes)

            arrays = [arg for arg in args if not isinstance(arg, np.generic)]
            nbytes = sum(array.nbytes for array in arrays)
            self.launches.append(Launch(file, name, start, nbytes))
            start()

        return run


def launches(replica: Replica, recorder: Recorder) -> list[tuple[Stage, Launch, int]]:
    """Return the memory-bound launches of a training step with their stages and bytes moved.

    Bytes are those of the plan if a stage is one kernel, otherwise those of the kernel's arrays.
    """
    plan, rng = replica.plan, np.random.default_rng(0)
    x = rng.standard_normal((plan.batch_size, *plan.network.input_shape), dtype=np.float32)
    outputs = plan.network.num_outputs
    classes = plan.network.loss.targets == "classes"
    shape = plan.batch_size, outputs
    y: Any = rng.integers(0, outputs, plan.batch_size) if classes else rng.random(shape)
    replica.forward_backward(x, y)
    found = []

    def note(stage: Stage, run: Callable[[], None]) -> None:
        recorder.launches.clear()
        run()
        alone = len(recorder.launches) == 1
        for one in recorder.launches:
            if one.file in FILES:
                found.append((stage, one, stage.bytes_moved if alone else one.nbytes))

    for stage, kernel in replica.stages:
        note(stage, lambda kernel=kernel: kernel(replica.context))  # type: ignore[misc]
    note(plan.stages[-1], lambda: replica.update(0.0))
    return found


def timed_in_turns(device: Any, starts: Sequence[Callable[[], None]]) -> Times:
    """Time a launch in a graph that alternates between `starts`."""
    return timed(starts, device.stream, LAUNCHES // len(starts) * len(starts), REPEATS)


class Copying:
    """Copies between arrays of a device, timed once for each size."""

    def __init__(self, device: Any) -> None:
        self._device, self._times = device, dict[tuple[int, int], float]()
        self._copy = device.function("elementwise.cu", "copy", VECTOR=4, PRECISION=0)

    def time_us(self, nbytes: int, sets: int) -> float:
        """Of reading and writing `nbytes` together, between so many pairs of arrays in turns."""
        size = max(nbytes // 8 // 4 * 4, 4)
        if (size, sets) not in self._times:
            pairs = [[self._device.zeros((size,), "float32") for _ in "xy"] for _ in range(sets)]
            starts = [
                lambda x=x, y=y: launch(self._copy, size // 4, x, y, np.int32(size))
                for x, y in pairs
            ]
            self._times[size, sets] = timed_in_turns(self._device, starts).median
        return self._times[size, sets]


def table(case: Case, device: Any, copying: Copying) -> None:
    """Print the kernels of one network."""
    network, batch_size, precision = case
    backend, recorder = CudaBackend(device), Recorder(device)
    plan = make_plan(network, backend, batch_size, precision=precision, optimizer=SGD(momentum=0.9))
    sets = REPLICAS.get(batch_size, 1)
    replicas = [launches(backend.make_replica(plan, seed=0), recorder) for _ in range(sets)]
    del device.function  # Watched no more.
    print(f"\n{network.name}, batch {batch_size}, {precision}")
    print(f"{'stage':<38}{'kernel':<24}{'MB':>8}{'µs':>9}{'quartiles':>17}{'TB/s':>7}{'copy':>7}")
    total = least = 0.0
    for same in zip(*replicas, strict=True):
        stage, one, nbytes = same[0]
        times = timed_in_turns(device, [turn.start for _, turn, _ in same])
        copy = copying.time_us(nbytes, sets)
        total, least = total + times.median, least + copy
        print(
            f"{stage.name:<38}{one.name:<24}{nbytes / 1e6:>8.2f}{times.median:>9.2f}"
            f"{times.low:>9.2f}{times.high:>8.2f}{nbytes / times.median / 1e6:>7.2f}"
            f"{copy / times.median:>7.0%}"
        )
    print(f"{'all':<70}{total:>9.1f}{'':>24}{least / max(total, 1e-9):>7.0%}", flush=True)


@click.command()
@takes_cases(NETWORKS, batches=tuple(REPLICAS), precisions=("fp32", "bf16"))
def main(cases: Sequence[Case]) -> None:
    """Print a table of memory-bound kernels for each network, batch size and precision."""
    from dptrain.backends.cuda.device.gpu import GPU

    device = GPU(0)
    copying = Copying(device)
    for nbytes in (1 << 20, 1 << 24, 1 << 28, 1 << 30):
        rate = nbytes / copying.time_us(nbytes, 3) / 1e6
        print(f"copying {nbytes / 1e6:.0f} MB, read and written: {rate:.2f} TB/s", flush=True)
    for case in cases:
        table(case, device, copying)


if __name__ == "__main__":
    sys.exit(main())
