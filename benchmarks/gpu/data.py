"""Measure training on generated images with augmentation: epochs of `dptrain train` on one GPU."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.gpu.ours import Step
from dptrain.comm.signals import StopRequest
from dptrain.network import Network
from dptrain.training.callbacks import Callback
from dptrain.training.trainer import Trainer

IMAGES, SIZE = 50_000, 32
"""Number of images, and their height and width."""

CROP, BRIGHTNESS, CONTRAST = 4, 0.2, 0.2
"""Pixels by which a crop moves from the centre, and largest changes of the colours; half of the
images are mirrored."""

EPOCHS, LEARNING_RATE = 6, 1e-6
"""Epochs of a run. The first one, with compilation and graph capture, and the last one, with the
evaluation, are not counted."""


def generated_images(network: Network, count: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return random images (count, C, 32, 32) and labels."""
    rng = np.random.default_rng(0)
    shape = count, network.input_shape[0], SIZE, SIZE
    images = rng.integers(0, 256, shape, dtype=np.uint8)
    return images, rng.integers(0, network.num_outputs, count)


@contextmanager
def images_file(network: Network, count: int) -> Iterator[str]:
    """Write the images to a temporary file and yield the name of the data set."""
    images, labels = generated_images(network, count)
    few = min(count, 100)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "images.npz"
        np.savez(
            path, x_train=images, y_train=labels, x_test=images[:few], y_test=labels[:few]
        )  # fmt: skip
        yield f"npz:{path}?fit=crop"


class EpochClock(Callback):
    """Records the time at the end of each epoch, in seconds.

    Attributes:
        ends: times by epoch.
        steps: number of steps made at each end.
    """

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.steps: list[int] = []

    def on_epoch(self, trainer: Trainer, record: Any) -> None:
        self.ends.append(time.perf_counter())
        self.steps.append(int(record["step"]))

    def needs_parameters(self, trainer: Trainer, step: int) -> bool:
        return False

    @property
    def step_us(self) -> tuple[float, ...]:
        """Mean time of a step in µs, for each epoch but the first and the last."""
        return tuple(1e6 * np.diff(self.ends[:-1]) / np.diff(self.steps[:-1]))


def make_trainer(
    network: Network, data: str, backend: str, precision: str, batch_size: int, clock: EpochClock,
    *, epochs: int = EPOCHS, **settings: Any,
) -> Trainer:  # fmt: skip
    """Return a trainer that changes the images at random."""
    return Trainer(
        network, data, callbacks=[clock], progress=False, backend=backend, precision=precision,
        batch_size=batch_size, epochs=epochs, crop=CROP, flip=True, brightness=BRIGHTNESS,
        contrast=CONTRAST, optimizer="sgd", momentum=0.0, schedule="constant",
        learning_rate=LEARNING_RATE, evaluate_every=0, baseline_steps=0, **settings,
    )  # fmt: skip


def fit(trainer: Trainer) -> None:
    """Train until the end.

    Raises:
        RuntimeError: training ended before its last step.
    """
    with StopRequest() as stop:
        trainer.fit(stop=stop)
    steps = trainer.job.spec.steps
    if trainer.step < steps:
        cause = f"after {stop.signal_name}" if stop.requested else "without a signal"
        raise RuntimeError(f"training ended {cause} after {trainer.step} of {steps} steps")


def train_epochs(
    network: Network, data: str, backend: str, precision: str, batch_size: int
) -> tuple[float, ...]:
    """Return the mean time of a step in µs for each epoch of a training run."""
    clock = EpochClock()
    fit(make_trainer(network, data, backend, precision, batch_size, clock))
    return clock.step_us


def bare_step_us(network: Network, backend: str, precision: str, batch_size: int) -> float:
    """Return the time of a step in µs that repeats one batch in GPU memory."""
    program = Step(network, backend, precision, batch_size).program
    program.time(3)
    return float(np.median([program.time(50) for _ in range(7)]))
