"""Launches of kernels whose threads keep their channels; see ``headers/channel_sums.cuh``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dptrain.backends.cuda.dense.gemm_tiles import ceil_div
from dptrain.backends.cuda.device.device import Function, Macro
from dptrain.backends.cuda.device.hardware import limits_of
from dptrain.backends.cuda.operation import Operation, vector_width
from dptrain.plan.lowering import BufferSpec, Setting

SUM_THREADS, MAP_THREADS = 512, 256
"""Threads of a block that sums channels, and of a block that only maps pixels."""

MAX_CHANNEL_VECTORS = 8
"""Largest number of vectors of a block along the channels: a cache line of 128 bytes."""

SUM_BLOCKS_PER_SM, MAP_BLOCKS_PER_SM = 2, 64
"""Most blocks for each multiprocessor: about what can be resident of sums, and eight times as many
of maps."""

FEW_MAP_BLOCKS_PER_SM = 8
"""Blocks of maps for each multiprocessor, if there are enough pixels for one of each thread."""

SUM_PIXELS, MAP_PIXELS = 4, 8
"""Pixels of each thread, if there are enough: fewer blocks leave less to the last one of a sum.
Maps of 2^20 pixels and 64 channels reach 3.79 TB/s in float32 and 3.75 in bfloat16 with these
limits, and maps of 2^16 pixels and 256 channels 3.50 and 3.05. With 32 blocks for each
multiprocessor, of any number of pixels, and loops unrolled by four, they reach 3.65, 3.75, 3.42 and
2.91 (H200)."""


@dataclass(frozen=True)
class ChannelLaunch:
    """The launch of a kernel over maps (pixels, channels).

    Attributes:
        width: elements of a vector, ``VECTOR``.
        vectors: vectors of a block along the channels, ``CHANNEL_VECTORS``.
        columns: blocks along the channels.
        threads: threads of a block, ``CHANNEL_THREADS``.
        max_blocks: largest number of blocks of a column.
        min_blocks: blocks of a column, if there are enough pixels for one of each thread.
        thread_pixels: pixels of a thread with a number of blocks between these.
    """

    width: int
    vectors: int
    columns: int
    threads: int
    max_blocks: int
    min_blocks: int
    thread_pixels: int

    @classmethod
    def of(cls, channels: int, setting: Setting, *, sums: bool) -> ChannelLaunch:
        """Return the launch for maps with a number of channels.

        Args:
            channels: of the maps.
            setting: of the plan.
            sums: True if the kernel adds over pixels.
        """
        width = vector_width(channels, 2 if setting.activations == "uint16" else 4)
        all_vectors = channels // width
        vectors = min(1 << (all_vectors - 1).bit_length(), MAX_CHANNEL_VECTORS)
        columns = ceil_div(all_vectors, vectors)
        multiprocessors = limits_of(setting).multiprocessors
        if sums:
            blocks = max(multiprocessors * SUM_BLOCKS_PER_SM // columns, 1)
            return cls(width, vectors, columns, SUM_THREADS, blocks, 1, SUM_PIXELS)
        most, few = (
            max(multiprocessors * per_sm // columns, 1)
            for per_sm in (MAP_BLOCKS_PER_SM, FEW_MAP_BLOCKS_PER_SM)
        )
        return cls(width, vectors, columns, MAP_THREADS, most, few, MAP_PIXELS)

    @property
    def defines(self) -> dict[str, int]:
        """Macros of the kernel."""
        return {
            "VECTOR": self.width,
            "CHANNEL_VECTORS": self.vectors,
            "CHANNEL_THREADS": self.threads,
        }

    def blocks(self, pixels: int) -> int:
        """Return the blocks of a column."""
        rows = self.threads // self.vectors
        few = min(ceil_div(pixels, rows), self.min_blocks)
        return max(min(ceil_div(pixels, rows * self.thread_pixels), self.max_blocks), few, 1)

    def tile(self, pixels: int) -> str:
        """Return the channels and pixels of a block, and the number of blocks, as text."""
        rows, blocks = self.threads // self.vectors, self.blocks(pixels) * self.columns
        return f"{self.vectors * self.width} channels x {rows} pixels, {blocks} blocks"

    def partial(self, pixels: int, rows: int, channels: int) -> BufferSpec:
        """Return the buffer for `rows` sums of each block and channel."""
        return BufferSpec((self.blocks(pixels), rows, channels), "float32")

    @property
    def tickets(self) -> BufferSpec:
        """The counters of finished blocks, which are 0 between kernels."""
        return BufferSpec((self.columns,), "uint32")

    def function(
        self, operation: Operation[Any], file: str, name: str, **defines: Macro
    ) -> Function:
        """Return a kernel compiled for this launch."""
        return operation.function(file, name, **self.defines, **defines)

    def enqueue(self, function: Function, pixels: int, args: Sequence[Any]) -> None:
        """Enqueue a kernel of this launch for a number of pixels."""
        function((self.blocks(pixels), self.columns, 1), (self.threads, 1, 1), args)
