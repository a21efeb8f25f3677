"""Launches of kernels whose threads keep their channels; see ``kernels/channel_sums.cuh``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dptrain.backends.cuda.device import Function
from dptrain.backends.cuda.gemm_tiles import ceil_div
from dptrain.backends.cuda.hardware import limits_of
from dptrain.backends.cuda.operation import Operation, vector_width
from dptrain.plan.lowering import BufferSpec, Setting

SUM_THREADS, MAP_THREADS = 512, 256
"""Threads of a block that sums channels, and of a block that only maps pixels."""

MAX_CHANNEL_VECTORS = 8
"""Largest number of vectors of a block along the channels: a cache line of 128 bytes."""

SUM_BLOCKS_PER_SM, MAP_BLOCKS_PER_SM = 2, 32
"""Most blocks for each multiprocessor: about what can be resident of sums, and four times as many
of maps. With eight, the maps of ResNet-18 (32×32, batch size 1024) took 1.2% longer in tf32 and
2.1% in bf16 (H100)."""

MIN_SUM_PIXELS = 4
"""Pixels of each thread of a sum, if there are enough: fewer blocks leave less to the last one."""


@dataclass(frozen=True)
class ChannelLaunch:
    """The launch of a kernel over maps (pixels, channels).

    Attributes:
        width: elements of a vector, ``VECTOR``.
        vectors: vectors of a block along the channels, ``CHANNEL_VECTORS``.
        columns: blocks along the channels.
        threads: threads of a block, ``CHANNEL_THREADS``.
        max_blocks: largest number of blocks of a column.
        thread_pixels: smallest number of pixels of a thread, unless there is one block.
    """

    width: int
    vectors: int
    columns: int
    threads: int
    max_blocks: int
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
        per_sm = SUM_BLOCKS_PER_SM if sums else MAP_BLOCKS_PER_SM
        blocks = max(limits_of(setting).multiprocessors * per_sm // columns, 1)
        threads = SUM_THREADS if sums else MAP_THREADS
        return cls(width, vectors, columns, threads, blocks, MIN_SUM_PIXELS if sums else 1)

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
        rows = self.threads // self.vectors * self.thread_pixels
        return max(min(ceil_div(pixels, rows), self.max_blocks), 1)

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

    def function(self, operation: Operation, file: str, name: str, **defines: int) -> Function:
        """Return a kernel compiled for this launch."""
        return operation.function(file, name, **self.defines, **defines)

    def enqueue(self, function: Function, pixels: int, args: Sequence[Any]) -> None:
        """Enqueue a kernel of this launch for a number of pixels."""
        function((self.blocks(pixels), self.columns, 1), (self.threads, 1, 1), args)
