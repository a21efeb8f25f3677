"""Measure training on images that are not in GPU memory: memory-mapped, or decoded by workers."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.gpu import targets
from benchmarks.gpu.data import EpochClock, bare_step_us, fit, generated_images, make_trainer
from benchmarks.tables import make_table
from benchmarks.targets import Target
from dptrain.data.stored import HOST_SHARE
from dptrain.machine import available_cores
from dptrain.network import Network
from dptrain.tables import Table
from dptrain.training.baseline import open_loader
from dptrain.training.trainer import Trainer

STREAMED, BLOCK = 500_000, 50_000
"""Number of images, which repeat after `BLOCK`; four fifths are for training."""

DEVICE_CACHE = 0.0008
"""Share of free GPU memory that the cache may take: less than a tenth of the images for training on
GPUs with up to 150 GB."""

DECODED = 20_000
"""Number of image files, which are decoded in each epoch."""

MEMORY_MAPPED, FILES = "memory-mapped", "PNG files"

EPOCHS = 4
READ_STEPS = 400
"""Minibatches of the measurement of reading alone."""


@dataclass(frozen=True)
class StreamResult:
    """Time of a step whose images are not in GPU memory, and of what may limit it.

    Attributes:
        source: `MEMORY_MAPPED` or `FILES`.
        network, batch_size, precision, backend: the case.
        us: µs of a step of training, a mean over an epoch, for the epochs that count.
        bare_us: µs of a step that repeats one batch in GPU memory.
        link_us: µs of the copy of a minibatch of images from pinned memory to the GPU.
        reading_us: µs in which the loader alone reads, and decodes, a minibatch.
        says: what the run states to limit it.
    """

    source: str
    network: str
    batch_size: int
    precision: str
    backend: str
    us: tuple[float, ...]
    bare_us: float
    link_us: float
    reading_us: float
    says: str

    @property
    def limits(self) -> dict[str, float]:
        """The parts that bound the time of a step from below, in µs."""
        return {"step": self.bare_us, "link": self.link_us, "reading": self.reading_us}

    @property
    def limit(self) -> str:
        """The part that takes longest."""
        return max(self.limits, key=lambda name: self.limits[name])

    @property
    def share(self) -> float:
        """Speed as a share of what the slowest part allows."""
        return self.limits[self.limit] / float(np.median(self.us))

    @property
    def goals(self) -> list[tuple[Target, float]]:
        """Targets, each with the measured value."""
        return [(targets.STREAM_SHARE, self.share)]


@contextmanager
def streamed_files(network: Network, count: int) -> Iterator[str]:
    """Write images and labels to temporary files and yield the name of the data set."""
    images, labels = generated_images(network, min(count, BLOCK))
    with tempfile.TemporaryDirectory() as folder:
        x, y = Path(folder) / "x.npy", Path(folder) / "y.npy"
        shape = count, *images.shape[1:]
        mapped = np.lib.format.open_memmap(x, "w+", images.dtype, shape)
        for start in range(0, count, BLOCK):
            part = mapped[start : start + BLOCK]
            part[...] = images[: len(part)]
        np.save(y, np.resize(labels, count))
        yield f"npy:{x},{y}?fit=crop"


@contextmanager
def image_files(network: Network, count: int) -> Iterator[str]:
    """Write PNG files of the network's size, by class, and yield the name of the data set."""
    from PIL import Image

    images, labels = generated_images(network, count)
    _, height, width = network.input_shape
    with tempfile.TemporaryDirectory() as folder:
        for label in range(network.num_outputs):
            (Path(folder) / f"{label:04d}").mkdir()
        for number, (image, label) in enumerate(zip(images, labels, strict=True)):
            pixels = image.transpose(1, 2, 0)[:height, :width].squeeze()
            Image.fromarray(pixels).save(Path(folder) / f"{label:04d}" / f"{number}.png")
        yield f"folder:{folder}"


def measure_stream(
    network: Network, data: str, backend: str, precision: str, batch_size: int,
    source: str = MEMORY_MAPPED,
) -> StreamResult:  # fmt: skip
    """Train on images that are not in GPU memory, and measure what may limit it.

    Image files are decoded by a process for each core but two, as if they did not fit into host
    memory.
    """
    clock, settings = EpochClock(), dict[str, Any]()
    if source == FILES:
        settings["workers"] = max(available_cores() - 2, 1)
    with mock.patch("dptrain.data.stored.HOST_SHARE", 0.0 if source == FILES else HOST_SHARE):
        trainer = make_trainer(
            network, data, backend, precision, batch_size, clock, epochs=EPOCHS,
            device_cache=DEVICE_CACHE, **settings,
        )  # fmt: skip
    assert trainer.job.cached_samples is None
    reading_us = _reading_us(trainer)
    fit(trainer)
    assert trainer.summary is not None
    found = trainer.summary["limit"]
    says = "" if found is None else f"{found['part']}, {found['share']:.0%}"
    on_gpu, samples = trainer.job.replica.memory.on_gpu, trainer.data.train
    numbers = int(np.prod(samples.readable_shape or trainer.data.input_shape))
    image_bytes = numbers * samples.pixels.itemsize
    return StreamResult(
        source, network.name, batch_size, precision, backend, clock.step_us,
        bare_step_us(network, backend, precision, batch_size),
        _link_us(batch_size * image_bytes) if on_gpu else 0.0, reading_us, says,
    )  # fmt: skip


def _reading_us(trainer: Trainer) -> float:
    """Return the µs in which the loader of a job reads a minibatch while nothing computes."""
    job = trainer.job
    last = min(READ_STEPS, job.spec.steps)
    with open_loader(job, range(last), batch_size=job.spec.batch_size) as batches:
        next(batches)
        begin = time.perf_counter()
        count = sum(1 for _ in batches)
        return 1e6 * (time.perf_counter() - begin) / max(count, 1)


def _link_us(nbytes: int, repeats: int = 20) -> float:
    """Return the µs of a copy from pinned memory to the GPU, of several in a row."""
    import cupy

    host, device = cupy.cuda.alloc_pinned_memory(nbytes), cupy.cuda.alloc(nbytes)
    stream, times = cupy.cuda.Stream(non_blocking=True), []
    for _ in range(5):
        begin = stream.record()
        for _ in range(repeats):
            device.copy_from_host_async(host.ptr, nbytes, stream)
        end = stream.record()
        end.synchronize()
        times.append(1e3 * cupy.cuda.get_elapsed_time(begin, end) / repeats)
    return float(np.median(times))


def stream_table(results: Sequence[StreamResult]) -> Table:
    """Compare training on streamed images with what its slowest part allows."""
    from benchmarks.gpu.report import verdict

    rows = [
        (
            r.source, r.network, str(r.batch_size), r.precision, r.backend,
            f"{np.median(r.us):.4g}", f"{1e6 * r.batch_size / np.median(r.us):,.0f}",
            *(f"{r.limits[name]:.4g}" for name in ("step", "link", "reading")),
            r.limit, f"{r.share:.3f}", r.says, f"≥ {targets.STREAM_SHARE.value:g}",
            verdict(r.goals),
        )
        for r in results
    ]  # fmt: skip
    columns = (
        "images", "network", "batch", "precision", "backend", "training µs", "samples/s",
        "bare step µs", "link µs", "reading µs", "limit", "share", "the run says", "target", "",
    )  # fmt: skip
    title = (
        f"Training on {STREAMED:,} memory-mapped images, at least ten times the GPU cache, and on "
        f"{DECODED:,} PNG files, changed as above: µs per step, median of epochs"
    )
    return make_table(title, columns, rows)


def stream_headline(results: Iterable[StreamResult]) -> list[str]:
    """Return a line with the range of shares."""
    shares = [r.share for r in results]
    if not shares:
        return []
    return [
        f"training on streamed images reaches {min(shares):.2f} to {max(shares):.2f} of what its "
        "slowest part allows"
    ]
