"""Measure training on generated images with augmentation: epochs of `dptrain train` on one GPU."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.gpu import targets
from benchmarks.gpu.ours import Step
from benchmarks.tables import make_table
from benchmarks.targets import Target
from dptrain.comm.signals import StopRequest
from dptrain.network import Network
from dptrain.tables import Table
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


@dataclass(frozen=True)
class DataResult:
    """Time of a step within epochs.

    Attributes:
        network, batch_size, precision, backend: the case; the batch is that of each GPU.
        us: µs of a step of training, a mean over an epoch, for the epochs that count.
        bare_us: µs of a step that repeats one batch in GPU memory.
        theirs: the same as `us` by mode of PyTorch, with images and augmentation on the GPU.
        gpus: number of GPUs.
    """

    network: str
    batch_size: int
    precision: str
    backend: str
    us: tuple[float, ...]
    bare_us: float
    theirs: dict[str, tuple[float, ...]]
    gpus: int = 1

    @property
    def share(self) -> float:
        """Speed as a share of that of the bare step."""
        return self.bare_us / float(np.median(self.us))

    @property
    def best(self) -> str | None:
        """PyTorch's fastest mode."""
        return min(self.theirs, key=lambda mode: float(np.median(self.theirs[mode])), default=None)

    @property
    def ratio(self) -> float | None:
        """Speedup over PyTorch's fastest mode."""
        if self.best is None:
            return None
        return float(np.median(self.theirs[self.best]) / np.median(self.us))

    @property
    def goals(self) -> list[tuple[Target, float]]:
        """Targets, each with the measured value."""
        goals = [(targets.DATA_SHARE, self.share)]
        return goals if self.ratio is None else [*goals, (targets.DATA_FASTER, self.ratio)]


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


def data_table(results: Sequence[DataResult]) -> Table:
    """Compare training on images with the bare step and with PyTorch."""
    from benchmarks.gpu.report import verdict

    rows = []
    for r in results:
        theirs = "" if r.best is None else f"{np.median(r.theirs[r.best]):.4g}"
        rows.append((
            r.network, str(r.gpus), str(r.batch_size), r.precision, r.backend,
            f"{np.median(r.us):.4g}", f"{1e6 * r.gpus * r.batch_size / np.median(r.us):,.0f}",
            f"{r.bare_us:.4g}", f"{r.share:.3f}",
            theirs, r.best or "", "" if r.ratio is None else f"{r.ratio:.2f}",
            ", ".join(f"≥ {target.value:g}" for target, _ in r.goals), verdict(r.goals),
        ))  # fmt: skip
    columns = (
        "network", "GPUs", "batch per GPU", "precision", "backend", "training µs", "samples/s",
        "bare step µs", "share", "PyTorch µs", "fastest mode", "speedup", "targets", "",
    )  # fmt: skip
    title = (
        f"Training on {IMAGES:,} uint8 images of {SIZE} × {SIZE} with crop, flip, brightness and "
        "contrast: µs per step, median of epochs"
    )
    return make_table(title, columns, rows)


def data_headline(results: Iterable[DataResult]) -> list[str]:
    """Return a line with the range of shares and speedups."""
    results = list(results)
    if not results:
        return []
    shares = [r.share for r in results]
    ratios = [r.ratio for r in results if r.ratio is not None]
    line = f"training on images reaches {min(shares):.2f} to {max(shares):.2f} of the bare step"
    if ratios:
        line += f"; {min(ratios):.2f} to {max(ratios):.2f} times as fast as PyTorch"
    return [line]
