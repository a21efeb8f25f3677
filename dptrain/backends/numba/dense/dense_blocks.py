"""The blocks into which the work of a dense layer is divided: items of the kernels of `matmul`."""

from __future__ import annotations

from typing import NamedTuple

from dptrain.backends.numba.vector import LINE

MIN_OPERATIONS = 50_000
"""Multiply-adds that are worth one more thread: 1 to 2 µs. Threads poll between stages, so one more
costs about 0.1 µs."""
MIN_FEATURES = 16
"""Features, of a sum or of its results, below which a product takes no less time."""
FIRST = 3
"""Multiply-adds that take as long as the read of one element of w from the L2 cache."""
READ = 20
"""Multiply-adds that take as long as reading one element of w, which prefetches hide."""
COPY = 12
"""Multiply-adds that take as long as copying one element of w."""
STEPS = 256
"""Largest number of steps of a product: a panel of B with this many stays in the L1 cache."""
ROWS_IN_CACHE = 98304
"""Elements of w that are read at a time: they stay in the L2 cache, next to the following ones."""
ROWS = 384
"""Rows of dw for which packing dy takes about 3% of the time."""
CHUNKS = 16
"""Largest number of chunks into which forward divides a sum, so that each thread reads only a part
of w, which its samples use too few times to divide them instead."""
MIN_CHUNK, MIN_CHUNKED_WEIGHTS, MAX_CHUNKED_OUTPUTS = 256, 65536, 511
"""Smallest number of inputs of a chunk, and smallest number of weights and largest number of
outputs of a layer with chunks."""


class Blocks(NamedTuple):
    """Sizes of the blocks of a stage.

    Attributes:
        samples: samples of a block.
        features: features of a block: outputs in forward, inputs in backward-input.
        chunk: features that a block sums; forward has ⌈inputs / chunk⌉ partial sums.
        steps: features that a product sums.
    """

    samples: int
    features: int
    chunk: int
    steps: int

    @property
    def grain(self) -> int:
        """Items that are worth one more thread."""
        return -(-MIN_OPERATIONS // _operations(self.samples, self.features, self.chunk))

    def num_items(self, samples: int, features: int, summed: int) -> int:
        """Return the number of items: blocks of samples × chunks × blocks of features."""
        blocks = -(-features // self.features) * -(-summed // self.chunk)
        return -(-samples // self.samples) * blocks


def forward_blocks(samples: int, inputs: int, outputs: int, threads: int) -> Blocks:
    """Return the blocks of `matmul.dense_forward`."""
    chunk = inputs
    if inputs * outputs >= MIN_CHUNKED_WEIGHTS and outputs <= MAX_CHUNKED_OUTPUTS:
        # A power of two divides evenly among usual numbers of threads.
        most = max(1, min(CHUNKS, inputs // MIN_CHUNK))
        chunk = min(inputs, _rounded_up(inputs, 1 << most.bit_length() - 1, LINE))
    steps = _even(chunk, max(64, min(STEPS, ROWS_IN_CACHE // outputs)))
    chunks = -(-inputs // chunk)
    across, down = _grid(samples, outputs, chunk, -(-threads // chunks), unit=(4, 16), split=COPY)
    return Blocks(down, across, chunk, steps)


def backward_input_blocks(samples: int, inputs: int, outputs: int, threads: int) -> Blocks:
    """Return the blocks of `matmul.dense_backward_input`."""
    across, down = _grid(samples, inputs, outputs, threads, unit=(16, 48), split=0)
    return Blocks(down, across, outputs, _even(outputs, STEPS))


def weight_gradient_grain(samples: int, inputs: int, outputs: int, threads: int) -> int:
    """Return the smallest number of rows of dw that a thread computes at a time.

    It packs dy for them, and fewer than `ROWS` take too little time compared with that.
    """
    useful = _useful_threads(samples, inputs, outputs, threads)
    rows = -(-inputs // useful)
    return max(LINE, rows if useful < threads else min(ROWS, rows))


def _grid(
    samples: int, features: int, summed: int, threads: int, *, unit: tuple[int, int], split: int
) -> tuple[int, int]:
    """Return the features and samples of a block, so that one block for each thread is fastest.

    Args:
        samples, features: what is divided.
        summed: features that each block sums.
        threads: largest number of blocks.
        unit: samples and features of a register tile.
        split: multiply-adds that blocks of fewer than all features cost for each of them.
    """
    useful = _useful_threads(samples, features, summed, threads)

    def block(across: int) -> tuple[int, int]:
        return (
            _rounded_up(features, across, unit[1]),
            _rounded_up(samples, useful // across, unit[0]),
        )

    def cost(across: int) -> int:
        wide, high = block(across)
        return wide * (max(high, READ) + (split if wide < features else 0))

    wide, high = block(min(range(1, useful + 1), key=cost))
    return min(wide, features), min(high, samples)


def _useful_threads(samples: int, features: int, summed: int, threads: int) -> int:
    """Return how many of the threads a product with w is worth."""
    return max(1, min(threads, _operations(samples, features, summed) // MIN_OPERATIONS))


def _operations(samples: int, features: int, summed: int) -> int:
    """Return the time of a product with w as a number of multiply-adds."""
    return (samples + FIRST) * max(features, MIN_FEATURES) * max(summed, MIN_FEATURES)


def _rounded_up(total: int, parts: int, unit: int) -> int:
    """Return the length of each of `parts` parts, a multiple of `unit`."""
    return -(-total // (parts * unit)) * unit


def _even(total: int, most: int) -> int:
    """Return a block length of at most `most` that divides `total` without a short last block."""
    return -(-total // -(-total // most))
