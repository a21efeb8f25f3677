"""Tile configurations and split-K of the general matrix-product kernels; see ``headers/gemm.cuh``.

A product C = A B has `rows` × `columns` elements, each a sum of `terms` products (M, N and K of
BLAS). A block of threads computes one tile of C.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

from dptrain.backends.cuda.device import hardware
from dptrain.backends.cuda.device.device import Extent
from dptrain.backends.cuda.device.hardware import (
    MIN_TF32X3_TERMS,
    VECTOR_BYTES,
    WARP_SIZE,
    allows_tf32x3,
)
from dptrain.plan.limits import DeviceLimits

TARGET_BLOCKS = 2
"""Blocks of a multiprocessor that occupy it."""

TARGET_THREADS = 512
"""Threads of a multiprocessor that hide each other's latency: 16 warps."""

MAX_BLOCK_THREADS = 512
"""Threads of a block; more would leave each thread too few registers."""

K_GROUPS = (1, 2, 4)
"""Numbers of thread groups that can share a tile (intra-block split-K)."""

MIN_SPLIT_TERMS = 128, 256
"""Candidates for the smallest number of terms of a split-K part."""

MAX_K_STEP = 64
"""Largest number of terms that a thread group processes in one step; ``TILE_K`` divides it."""

TF32X3_COST = 0.35
"""Estimated instruction slots of 3xTF32 per element of a tile and 16 terms; a fused multiply-add
takes 0.5. Three ``mma.sync``, at 62% of the peak of tensor cores, take 0.30; splitting operands and
promoting sums is partly hidden. Not yet measured."""

WASTE_EXPONENT = 0.25
"""If a product does not fill the GPU, its estimate grows with (covered / needed area) to this."""

SECOND_PASS, ADD_PART = 3e5, 1.5
"""Cost of split-K reduction: fixed, and per element of a part. About 3·10⁵ units are 1 µs."""


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def vector_elements(length: int, itemsize: int) -> int:
    """Return how many elements of a row of `length` one access reads: at most 16 bytes."""
    return math.gcd(length, VECTOR_BYTES // itemsize)


class BlockTile(Protocol):
    """The tile configuration of a kernel, as the stage that launches it uses it.

    Attributes:
        ALGORITHM: name of the algorithm.
    """

    ALGORITHM: ClassVar[str]

    @property
    def defines(self) -> Mapping[str, int]:
        """Macros of the kernel."""

    @property
    def block(self) -> Extent:
        """Threads of a block."""

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block, in bytes."""

    def grid(self, rows: int, columns: int, parts: int = 1) -> Extent:
        """Return the blocks of a product of rows × columns whose sum is split into `parts`."""


def _slice_bytes(width: int, k_words: int) -> int:
    """Return the padded size of an operand slice, for the larger of its two layouts."""
    return 4 * max(width * (k_words + 4), k_words * (width + 8))


@dataclass(frozen=True)
class GemmTile:
    """Tile of a block, and the part of it that one worker computes.

    Attributes:
        rows, columns: of the tile.
        worker_rows, worker_columns: of a worker: a warp with tensor cores, otherwise a thread.
        tensor_cores: whether tensor cores multiply.
        prefetch_steps: steps along K whose slices are fetched in advance.
        k_groups: thread groups that share the tile and split K between them.
        k_words: 32-bit words of a slice along K, with tensor cores.
        tf32x3: whether tensor cores compute products of float32 from TF32 parts (3xTF32).
    """

    rows: int
    columns: int
    worker_rows: int
    worker_columns: int
    tensor_cores: bool = False
    prefetch_steps: int = 1
    k_groups: int = 1
    k_words: int = 16
    tf32x3: bool = False

    ALGORITHM: ClassVar[str] = "general GEMM"

    @property
    def defines(self) -> dict[str, int]:
        """Macros of ``gemm.cuh``."""
        worker = "WARP" if self.tensor_cores else "THREAD"
        k_words = {"TILE_K_WORDS": self.k_words} if self.tensor_cores else {}
        tf32x3 = {"TF32X3": 1} if self.tf32x3 else {}
        return {
            **k_words,
            **tf32x3,
            "TILE_M": self.rows,
            "TILE_N": self.columns,
            f"{worker}_M": self.worker_rows,
            f"{worker}_N": self.worker_columns,
            "PREFETCH_STEPS": self.prefetch_steps,
            "K_GROUPS": self.k_groups,
        }

    @property
    def block(self) -> Extent:
        """Threads of a block."""
        workers = self.rows * self.columns // (self.worker_rows * self.worker_columns)
        return workers * (WARP_SIZE if self.tensor_cores else 1), self.k_groups, 1

    @property
    def shared_bytes(self) -> int:
        """Double-buffered slices of both operands, or the partial sums that groups exchange."""
        operands = sum(_slice_bytes(n, self.k_words) for n in (self.rows, self.columns))
        return max(2 * self.k_groups * operands, 4 * (self.k_groups - 1) * self.rows * self.columns)

    def grid(self, rows: int, columns: int, parts: int = 1) -> Extent:
        """Return the blocks of a product of rows × columns whose sum is split into `parts`."""
        return ceil_div(rows, self.rows), ceil_div(columns, self.columns), parts

    def num_tiles(self, rows: int, columns: int) -> int:
        """Return the number of tiles of a product of rows × columns."""
        return ceil_div(rows, self.rows) * ceil_div(columns, self.columns)

    @property
    def k_step(self) -> int:
        """Terms that a thread group processes in one step, or half of them with bf16."""
        return self.k_words if self.tensor_cores else 16

    @property
    def step_cost(self) -> float:
        """Estimated warp instructions of one step of a block if nothing stalls.

        Counted are: copies of 16 bytes to shared memory (about 18 instructions for four per row),
        multiplications (a tensor-core instruction counts as about two) and operand reads.
        """
        area, worker_area = self.rows * self.columns, self.worker_rows * self.worker_columns
        load = 2.25 * (self.rows + self.columns)
        read = area * (self.worker_rows + self.worker_columns) / worker_area
        step = load + area / 16 + read / 4 if self.tensor_cores else load + area / 2 + read / 8
        if self.tf32x3:
            step = load + TF32X3_COST * area + read / 4
        return step * self.k_step / 16

    def __str__(self) -> str:
        worker = f"{self.worker_rows}x{self.worker_columns}"
        pipeline = f"{self.prefetch_steps}x{self.k_groups}x{self.k_words}"
        name = f"{self.rows}x{self.columns}/{worker}/{pipeline}"
        return f"{name}/3xtf32" if self.tf32x3 else name


THREAD_TILES = (
    GemmTile(128, 16, 4, 4),
    GemmTile(128, 32, 8, 4),
    GemmTile(64, 64, 4, 4),
    GemmTile(128, 64, 8, 4),
)
"""Tiles for fp32, on CUDA cores."""

TENSOR_TILES = (
    GemmTile(32, 16, 32, 16, tensor_cores=True, prefetch_steps=2),
    GemmTile(64, 16, 32, 16, tensor_cores=True, prefetch_steps=2),
    GemmTile(128, 16, 32, 16, tensor_cores=True),
    GemmTile(32, 32, 32, 16, tensor_cores=True, prefetch_steps=2),
    GemmTile(64, 32, 32, 16, tensor_cores=True, prefetch_steps=2),
    GemmTile(128, 32, 32, 32, tensor_cores=True),
    GemmTile(32, 64, 32, 16, tensor_cores=True, prefetch_steps=2),
    GemmTile(64, 64, 32, 32, tensor_cores=True, prefetch_steps=2),
    GemmTile(128, 64, 32, 32, tensor_cores=True, k_words=32),
    GemmTile(128, 128, 64, 32, tensor_cores=True),
)
"""Tiles for tf32 and bf16, with the prefetch distance and slice length that were fastest in most
cases on an H200."""


TF32X3_TILES = tuple(
    GemmTile(rows, columns, 32, worker_columns, tensor_cores=True, tf32x3=True)
    for rows, columns, worker_columns in (
        (64, 16, 16), (128, 16, 16), (64, 32, 16), (128, 32, 16), (64, 64, 16), (128, 64, 32),
    )
)  # fmt: skip
"""Tiles for fp32 on tensor cores. Fragments of two parts leave no registers for prefetching two
steps, or for larger tiles."""


def gemm_tiles(precision: str, terms: int, limits: DeviceLimits) -> Sequence[GemmTile]:
    """Return the tiles that compute sums of `terms` products in `precision`."""
    if precision != "fp32":
        return TENSOR_TILES
    if allows_tf32x3(precision, limits) and terms >= MIN_TF32X3_TERMS:
        return *THREAD_TILES, *TF32X3_TILES
    return THREAD_TILES


@dataclass(frozen=True)
class SplitK:
    """Split of a long sum into parts that different blocks compute (split-K).

    Attributes:
        count: largest number of parts.
        terms: terms of each part but the last.
    """

    count: int
    terms: int

    def used(self, terms: int) -> int:
        """Return the parts of a sum of `terms`. An empty sum has one part, whose value is 0."""
        return max(ceil_div(terms, self.terms), 1)


def split_terms(
    terms: int, threads: int, limits: DeviceLimits, min_terms: int = MIN_SPLIT_TERMS[0]
) -> SplitK:
    """Return the split of a sum whose result tiles occupy `threads` threads.

    All parts run in one wave: a second, incomplete wave would take as long as the first.

    Args:
        terms: terms of the sum.
        threads: threads that compute the product without split-K.
        limits: of the GPU.
        min_terms: smallest number of terms of a part.
    """
    wanted = max(limits.multiprocessors * TARGET_THREADS // threads, 1)
    part = max(ceil_div(ceil_div(terms, wanted), MAX_K_STEP) * MAX_K_STEP, min_terms)
    return SplitK(ceil_div(terms, part), part)


@dataclass(frozen=True)
class GemmConfig:
    """How a product is computed: its tile configuration and its split-K."""

    tile: BlockTile
    split_k: SplitK

    def __str__(self) -> str:
        return f"{self.tile}, split-K {self.split_k.count}"


@functools.cache
def rank_gemm_configs(
    precision: str, rows: int, columns: int, terms: int, limits: DeviceLimits, *,
    split: bool = False,
) -> tuple[tuple[float, GemmConfig], ...]:  # fmt: skip
    """Return the configurations with their estimated times.

    Large tiles load less per multiplication. Small products fill the GPU only with small tiles,
    intra-block split-K and, if `split`, split-K across blocks. Parts of a tile outside the product
    are wasted. The estimate counts instructions with `TARGET_THREADS` resident threads of each
    multiprocessor.

    On an H200 the selected tiles took 1.09 times as long as the fastest (geometric mean, batch size
    32). The worst case was 1.8 times (weight gradient of cifar's conv1, bf16, batch size 2048).

    Args:
        precision: ``fp32``, ``tf32`` or ``bf16``.
        rows, columns: of the result.
        terms: of each sum.
        limits: of the GPU.
        split: whether the kernel supports split-K across blocks.
    """
    target_threads = limits.multiprocessors * TARGET_THREADS

    def estimate(tile: GemmTile, split_k: SplitK) -> tuple[float, GemmConfig]:
        blocks = tile.num_tiles(rows, columns)
        covered = blocks * tile.rows * tile.columns / (rows * columns)
        blocks *= split_k.count
        k_step = tile.k_step * (2 if precision == "bf16" else 1)
        steps = ceil_div(min(split_k.terms, terms), k_step)
        threads = blocks * tile.block[0]
        k_groups = max(
            n for n in K_GROUPS
            if n == 1 or (
                threads * n <= target_threads and steps >= n
                and tile.block[0] * n <= MAX_BLOCK_THREADS
                and replace(tile, k_groups=n).shared_bytes <= limits.shared_bytes
            )
        )  # fmt: skip
        waves = threads * k_groups / target_threads
        # The last of several waves is half full on average.
        slowdown = max(1.0, waves + 0.5 if waves > 1.0 else 1.0) / waves
        time = blocks * tile.step_cost * (steps + 2 * k_groups) * slowdown
        if waves < 1.0:
            time *= covered**WASTE_EXPONENT
        if split_k.count > 1:
            time += SECOND_PASS + ADD_PART * split_k.count * rows * columns
        if tile.tf32x3:
            time *= hardware.TF32X3_MARGIN
        return time, GemmConfig(replace(tile, k_groups=k_groups), split_k)

    def splits(tile: GemmTile) -> Iterator[SplitK]:
        yield SplitK(1, max(terms, 1))
        if split:
            threads = tile.num_tiles(rows, columns) * tile.block[0]
            yield from (split_terms(terms, threads, limits, least) for least in MIN_SPLIT_TERMS)

    return tuple(
        estimate(tile, split_k)
        for tile in gemm_tiles(precision, terms, limits)
        if tile.shared_bytes <= limits.shared_bytes
        for split_k in splits(tile)
    )
