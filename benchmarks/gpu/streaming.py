"""Measure training on images that are not in GPU memory: memory-mapped, or decoded by workers."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.gpu.data import EpochClock, bare_step_us, fit, generated_images, make_trainer
from benchmarks.report import OURS
from dptrain.data.stored import HOST_SHARE
from dptrain.machine import available_cores
from dptrain.network import Network
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
) -> dict[str, Any]:  # fmt: skip
    """Train on images that are not in GPU memory, and measure what may limit it.

    Image files are decoded by a process for each core but two, as if they did not fit into host
    memory.

    Returns:
        The case; ``us`` of a step, means over the epochs that count; ``limits_ms``, which bound it
        from below: a step that repeats one batch in GPU memory, the copy of a minibatch of images
        from pinned memory to the GPU, and the loader alone reading and decoding a minibatch;
        ``says``, what the run states to limit it.
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
    link_us = _link_us(batch_size * image_bytes) if on_gpu else 0.0
    limits = {"step": bare_step_us(network, backend, precision, batch_size), "link": link_us,
              "reading": reading_us}  # fmt: skip
    return {
        "network": network.name, "batch": batch_size, "precision": precision,
        "program": f"{OURS} {backend}", "us": clock.step_us, "says": says,
        "limits_ms": {name: each / 1e3 for name, each in limits.items()},
    }  # fmt: skip


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
