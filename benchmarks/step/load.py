"""Measure what loading a minibatch of cached images adds to a training step on a GPU.

    python3 -m benchmarks.step.load [--batch N ...] [--precision P ...] [NETWORK ...]

Requires a GPU and CuPy. The images have 8-bit pixels and are cropped, mirrored and recoloured. The
kernel reads its message of crop windows from host memory if the message is short, else from a copy
on the GPU. Both are measured for each batch size: the kernel alone; a step of the same minibatch,
with the copy of its loss sums to the host, and after the kernel, each in a CUDA graph; and steps
for which the host writes a message each time, with the kernel in the step's graph or, as in
training, on a stream of its own during the step before. The last lines are the host's work for
such a step.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from unittest import mock

import click
import numpy as np

from benchmarks.gpu.data import BRIGHTNESS, CONTRAST, CROP
from benchmarks.outside import find_network
from dptrain.backends.cuda.backend import CudaBackend
from dptrain.backends.cuda.device import device as device_module
from dptrain.backends.cuda.replica import CudaReplica
from dptrain.backends.pixels import PixelFormat
from dptrain.batch import Batch
from dptrain.data.loading.augmentation import Augmentation
from dptrain.network.network import Network
from dptrain.plan import SGD
from dptrain.plan.plan import make_plan

IMAGES, BORDER = 5000, 8
"""Number of images, and pixels by which they are higher and wider than the network's input."""

LEARNING_RATE = 1e-12
LOADS, STEPS, REPEATS = 10, 200, 5
"""Loads in a graph, steps in a row, and repeats of them."""

MESSAGES = {"from host": 1 << 30, "copied": 0}
"""Largest message that the kernel reads from host memory, by the name of the column."""


class Load:
    """A replica with cached images and a staged minibatch."""

    def __init__(self, network: Network, n: int, precision: str, backend: CudaBackend) -> None:
        plan = make_plan(network, backend, n, precision=precision, optimizer=SGD(momentum=0.0))
        replica = backend.make_replica(plan, seed=0)
        assert isinstance(replica, CudaReplica)
        random, (channels, height, width) = np.random.default_rng(0), network.input_shape
        canvas = channels, height + BORDER, width + BORDER
        images = random.integers(0, 256, (IMAGES, *canvas), np.uint8)
        replica.cache_images(images, PixelFormat("uint8", 2 / 255, -1.0))
        self.replica, samples = replica, random.integers(0, IMAGES, n)
        y = random.integers(0, network.num_outputs, n).astype(np.int32)
        change = Augmentation(CROP, True, BRIGHTNESS, CONTRAST)
        draws = change.draw(0, 0, samples)
        windows = change.crop_windows(network.input_shape, draws, canvas, samples)
        colours = change.recolourings(draws, channels)
        batch = Batch.of_windows(windows, y, recolourings=colours)
        self._batch = batch._replace(samples=samples)
        self.stage()
        self.replica.unpack_staged_batch()
        self.replica.sums_future()

    def stage(self) -> None:
        """Write the minibatch to the next staging slot."""
        replica = self.replica
        replica.stage_batch(
            self._batch,
            learning_rate=LEARNING_RATE,
            slot=(replica.staging_slot + 1) % (replica.max_steps_in_flight + 1),
        )

    def alone(self) -> None:
        """Load the minibatch several times."""
        for _ in range(LOADS):
            self.replica.unpack_staged_batch()

    def bare(self) -> None:
        """Enqueue a step of the minibatch in memory."""
        self.replica.run(early=True)
        self.replica.enqueue_update(rest=True)

    def without(self) -> None:
        """Enqueue a step of the minibatch in memory, and the copy of its loss sums."""
        self.replica.run(early=True)
        self.replica.enqueue_sums_copy()
        self.replica.enqueue_update(rest=True)

    def before(self) -> None:
        """Enqueue a step after the load."""
        self.replica.unpack_staged_batch()
        self.without()

    def steps_us(self, *, ahead: bool) -> dict[str, float]:
        """Return the time of a step if the host writes each message, and of the host's work."""
        replica, in_flight = self.replica, list[Callable[[float], list[float]]]()
        loads, programs = dict[int, Callable[[], None]](), dict[int, Callable[[], None]]()
        host_ns = [0, 0, 0]

        def step() -> None:
            while len(in_flight) >= replica.max_steps_in_flight:
                in_flight.pop(0)(10.0)
            moments = [time.perf_counter_ns()]
            self.stage()
            moments.append(time.perf_counter_ns())
            slot = replica.staging_slot
            if slot not in programs:
                loads[slot] = replica.memory.program(replica.unpack_staged_batch)
                programs[slot] = replica.memory.program(self.without if ahead else self.before)
            if ahead:
                with replica.load_stream():
                    loads[slot]()
            moments.append(time.perf_counter_ns())
            programs[slot]()
            in_flight.append(replica.sums_future())
            moments.append(time.perf_counter_ns())
            for i in range(3):
                host_ns[i] += moments[i + 1] - moments[i]

        times = []
        for repeat in range(REPEATS + 1):
            if repeat == 1:
                host_ns[:] = 0, 0, 0
            replica.memory.synchronize()
            begin = time.perf_counter()
            for _ in range(STEPS):
                step()
            replica.memory.synchronize()
            times.append(1e6 * (time.perf_counter() - begin) / STEPS)
        names = "host: message", "host: load", "host: step"
        work = (ns / (1e3 * REPEATS * STEPS) for ns in host_ns)
        return {"steps": statistics.median(times[1:]), **dict(zip(names, work, strict=True))}

    def times_us(self) -> dict[str, float]:
        """Return the times in µs by what was measured."""
        graphs = {
            "load alone": self.alone, "step": self.bare, "step, copy of sums": self.without,
            "load, step, copy of sums": self.before,
        }  # fmt: skip
        found = {
            name: 1e3 * statistics.median(self.replica.device.times_ms(start))
            for name, start in graphs.items()
        }
        found["load alone"] /= LOADS
        found["from the host, load in graph"] = self.steps_us(ahead=False)["steps"]
        host = self.steps_us(ahead=True)
        return {**found, "from the host, load ahead": host.pop("steps"), **host}


def report(network: Network, n: int, precision: str, backend: CudaBackend) -> Iterator[str]:
    """Yield the lines of a case."""
    columns = []
    for limit in MESSAGES.values():
        with mock.patch.object(device_module, "DIRECT_READ_BYTES", limit):
            columns.append(Load(network, n, precision, backend).times_us())
    title = f"{network.name}, batch {n}, {precision}: µs"
    yield f"\n{title:<32}" + "".join(f"{name:>12}" for name in MESSAGES)
    for name in columns[0]:
        yield f"{name:<32}" + "".join(f"{column[name]:>12.1f}" for column in columns)


@click.command()
@click.option("--batch", "batches", multiple=True, type=click.IntRange(1), default=(32, 128, 1024))
@click.option("--precision", "precisions", multiple=True, default=("tf32", "bf16"))
@click.argument("names", nargs=-1, metavar="[NETWORK]...")
def main(batches: Sequence[int], precisions: Sequence[str], names: Sequence[str]) -> None:
    """Measure what loading a minibatch adds to a step on the first GPU."""
    from dptrain.backends.cuda.backend import open_device

    backend = CudaBackend(open_device(0))
    for case in itertools.product(map(find_network, names or ("cifar",)), batches, precisions):
        for line in report(*case, backend):
            print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
