"""What the algorithms of a convolution are planned for, and what planning returns.

An algorithm's module defines ``plan(shape, phase, work)``, which returns a `KernelPlan`, and a row
of `algorithms.CONVOLUTION`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from dptrain.backends.numba.vector import compiled_registers
from dptrain.plan.lowering import Phase, Setting

ACCEPTED_BALANCE = 0.965
"""Share of the threads' time that is used at which `units_per_item` looks no further."""
COST_OF_A_UNIT = 0.01
"""Assumed cost of one more unit of a sample, as a share of the sample's time: rows that two bands
share are loaded twice, and tiles end at the end of a band."""

DIRECT = 50.0
"""Multiply-adds per ns of a direct convolution on one core of an Intel Xeon (AVX-512, 2 MB of L2).
Estimates are times on this core. Only their ratios matter, and they do not depend on the machine,
so that every node selects the same algorithms."""
PEAK = 80.0
"""Multiply-adds per ns that the vector units of that core compute at most: 32 in a cycle, at an
assumed 2.5 GHz. Only the marks of `dptrain describe` depend on it and on `BANDWIDTHS`."""
BANDWIDTHS = ((0, 60.0), (2 << 20, 23.0))
"""Bytes, and the GB/s of larger data: from L2, as in `pointwise_convolution.COPY`, and from memory,
as measured with one thread of an AMD EPYC."""
WIDTH = 16
"""Filters of a vector of that core."""

MIN_MULTIPLY_ADDS = 300_000
"""Multiply-adds of a direct convolution that are worth one more thread: 5 µs. A thread starts
within a microsecond, but fetches weights and maps from another core's cache at 20 GB/s."""

MIN_INFERENCE_MULTIPLY_ADDS = 150_000
"""The same in inference: 3 µs. Weights do not come from another core. A launch on 8 threads takes 2
µs longer than on one (16 cores of an Intel Xeon)."""


SAVED_IN_INFERENCE = 2
"""Largest `KernelPlan.saved` in inference, in which each thread's cache keeps the weights that it
reads."""


@dataclass(frozen=True)
class Shape:
    """The properties of a convolution on which the selection depends.

    Attributes:
        maps: (H, W, C) of the input.
        out: (Ho, Wo, K) of the convolution's output, before pooling.
        window: (R, S), size of the filters.
        strides: (vertical, horizontal).
        pads: (top, left).
        pool_height: height of the windows of fused pooling; 0 without pooling.
        halved: True if the pooling windows are 2 × 2 with stride 2 and without padding.
        pool_stride: vertical stride of the windows; 0 if it is their height.
        dilations: (vertical, horizontal).
    """

    maps: tuple[int, int, int]
    out: tuple[int, int, int]
    window: tuple[int, int]
    strides: tuple[int, int]
    pads: tuple[int, int]
    pool_height: int = 0
    halved: bool = False
    pool_stride: int = 0
    dilations: tuple[int, int] = (1, 1)

    @property
    def dy_pads(self) -> tuple[int, int]:
        """Padding of dy (top, left) for the input gradient."""
        return self.window[0] - 1 - self.pads[0], self.window[1] - 1 - self.pads[1]

    def multiply_adds(self, phase: Phase) -> int:
        """Return the multiply-adds of a sample, with whole vectors of channels of the result."""
        width = compiled_registers().width
        channels, results = self.maps[2], self.out[2]
        if phase is Phase.BACKWARD_INPUT:
            channels, results = results, channels
        products = math.prod(self.out[:2]) * math.prod(self.window) * channels
        return products * (-(-results // width) * width)

    @property
    def is_plain(self) -> bool:
        """True if strides are 1 and no filter position is entirely in the padding."""
        fits = (self.out[i] - self.maps[i] <= self.pads[i] for i in range(2))
        return self.strides == (1, 1) and min(self.dy_pads) >= 0 and all(fits)


@dataclass(frozen=True)
class Work:
    """The samples and threads of a step, on which the division into units depends.

    Attributes:
        batch_size: largest number of samples in a step.
        threads: compute threads.
        rows: rows of partial sums of the weight gradient.
        by_shape: True if the algorithm must follow from the shape alone, and not from the number of
            samples.
        keeps_weights: True if transformed weights are kept until the weights change: inference.
    """

    batch_size: int = 1
    threads: int = 1
    rows: int = 1
    by_shape: bool = True
    keeps_weights: bool = False

    def items(self, phase: Phase) -> int:
        """Return the number of samples or, for the weight gradient, of rows of partial sums."""
        return self.rows if phase is Phase.BACKWARD_WEIGHT else self.batch_size

    def worthwhile_units(self, shape: Shape, phase: Phase, units: int, least: int) -> int:
        """Return the number of units that are worth one more thread.

        Args:
            shape: the convolution.
            phase: forward or one of the two backward phases.
            units: units of each item.
            least: multiply-adds that are worth one more thread.
        """
        samples = self.batch_size // self.rows if phase is Phase.BACKWARD_WEIGHT else 1
        return max(1, least * units // (max(1, samples) * shape.multiply_adds(phase)))


@dataclass(frozen=True)
class Case:
    """A phase of a convolution, for which an algorithm is selected.

    Attributes:
        shape, phase, work: the convolution, the phase, and the samples and threads.
        winograd: False excludes the Winograd algorithms, whose rounding errors are larger.
    """

    shape: Shape
    phase: Phase
    work: Work = field(default_factory=Work)
    winograd: bool = True

    @property
    def samples(self) -> int:
        """Samples that estimates are made for: one if they must follow from the shape alone."""
        return 1 if self.work.by_shape else self.work.batch_size

    @property
    def direct_ns(self) -> float:
        """Time of a direct convolution."""
        (height, width, k), positions = self.shape.out, math.prod(self.shape.window)
        filters = -(-k // WIDTH) * WIDTH
        pixels = self.samples * height * width
        return pixels * positions * self.shape.maps[2] * filters / DIRECT


@dataclass(frozen=True)
class KernelPlan:
    """The kernel that computes a phase.

    Attributes:
        kernel: the kernel to bind.
        geometry: named tuple of integers, the kernel's geometry argument. Its `units` are the items
            of the kernel for each sample (bands) or, in the weight gradient, for each row of
            partial sums (blocks). Results do not depend on them.
        scratch: float32 elements of scratch memory for each thread.
        tile: description of the tile that stays in registers, and of the rows in scratch.
        prepare: kernel with the arguments (w, geometry, shared) that transforms the weights before
            each launch; None if nothing is transformed.
        prepare_items: number of items of `prepare`.
        prepare_grain: smallest number of them for which one more thread is worth its start.
        shared: float32 elements that `prepare` writes and all threads read.
        grain: smallest number of items for which one more thread is worth its start.
        rows: rows of partial sums of a weight gradient; 0 for those of `Work`.
        saved: how many times more multiply-adds are worth one more thread, compared with a direct
            convolution.
    """

    kernel: Any
    geometry: Any
    scratch: int
    tile: str
    prepare: Any = None
    prepare_items: int = 0
    shared: int = 0
    grain: int = 1
    prepare_grain: int = 1
    rows: int = 0
    saved: int = 1

    @property
    def units(self) -> int:
        """The `units` of the geometry."""
        units: int = self.geometry.units
        return units


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as ``2 rows``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def units_per_item(items: int, threads: int, most: int, least: int = 1) -> int:
    """Return the number of units into which each item is divided, so that all threads have work.

    Args:
        items: samples, or rows of partial sums: `Work.items`.
        threads: compute threads, each of which receives a contiguous range of units.
        most: largest useful number of units, such as the number of output rows.
        least: smallest number of units, if a larger unit exceeds a cache.

    Example:
        >>> units_per_item(32, 24, most=16)  # 96 units, 4 for each thread
        3
        >>> units_per_item(1, 24, most=16)
        16
    """
    best, best_score = least, 0.0
    for units in range(least, max(least, most) + 1):
        total = items * units
        balance = total / (threads * -(-total // threads))
        score = balance / (1 + COST_OF_A_UNIT * (units - least))
        if score > best_score:
            best, best_score = units, score
        if balance >= ACCEPTED_BALANCE:
            break
    return best


def rows_of_partial_sums(batch_size: int, threads: int) -> int:
    """Return the rows of partial sums of a weight gradient without micro-shards.

    Rows have about the same number of samples; if samples do not divide evenly among threads, the
    blocks of a row do.

    Example:
        >>> rows_of_partial_sums(32, 24)  # 2 samples each
        16
    """
    samples = -(-batch_size // threads)
    return -(-batch_size // samples)


def work_of(setting: Setting) -> Work:
    """Return the samples and threads of a plan."""
    rows = setting.shards or rows_of_partial_sums(setting.batch_size, setting.threads)
    return Work(setting.batch_size, setting.threads, rows, setting.shards > 0, not setting.training)
