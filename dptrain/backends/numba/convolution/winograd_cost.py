"""Estimated times of a Winograd convolution's forward pass, in the unit of `planning.DIRECT`.

They decide whether transforming the weights pays, and how tiles and filters are divided among
threads.
"""

from __future__ import annotations

import math

from dptrain.backends.numba.convolution.planning import WIDTH, Case
from dptrain.backends.numba.convolution.winograd_transforms import MATRICES, SIDES
from dptrain.backends.numba.vector import compiled_registers

PRODUCTS, SINGLE_VECTOR_PRODUCTS = 65.0, 50.0
"""Multiply-adds per ns of the 36 products, and with a single vector of filters."""
INPUT, OUTPUT = 9.0, 5.0
"""Time to transform a tile of a channel, of the input and of the output."""
WEIGHTS = 10.0
"""Time to transform the weights of a pair of channels."""
FROM_L2, FROM_L3 = 32.0, 16.0
"""Bytes per ns that a core reads from its L2 cache, and from the L3 cache or another core's L2."""
FROM_OTHERS = 13.0
"""Bytes per ns that a core reads of more than `NEAR_BYTES` of weights that other cores have just
transformed: between the 9 of 38 MB and the rate of the L3 cache."""
NEAR_BYTES = 1 << 20
"""Largest size of the transformed weights that stay in an L2 cache."""
FEWEST_ROWS = 4
"""Smallest number of tiles that a product computes at a time."""
ACCEPTED = 0.75
"""Largest time of Winograd relative to that of a direct convolution, whose errors are smaller and
which reads fewer weights."""
MIN_GAIN_NS = 3000.0
"""Smallest time that dividing filters must save."""
SUM_PASSES = 3
"""How often the sums of a weight gradient are written or read between cores and L3 cache."""
ACCEPTED_ROWS = 0.75
"""Largest share of the repeated and saved time at which samples are not divided first."""
BALANCED = 8
"""Rows of tiles per thread from which only rows are divided, unless weights exceed the cache."""

MOST_PARTS = 1024
"""Largest number of parts of the filters that is considered; each takes time to plan."""


def are_near(c: int, k: int) -> bool:
    """Return whether transformed weights, or sums of their gradient, stay in an L2 cache."""
    return 4 * MATRICES * c * k <= NEAR_BYTES


def estimated_ns(case: Case) -> float:
    """Return the time of a case, divided by `ACCEPTED`. It is that of the forward pass, so that all
    phases of a layer have the same algorithm, and does not depend on the threads.

    If the shape alone must decide, only the products of its outputs count.
    """
    shape, work = case.shape, case.work
    side, c = SIDES[shape.window[0]], shape.maps[2]
    k = -(-shape.out[2] // WIDTH) * WIDTH
    if work.by_shape:
        pixels = math.prod(shape.out[:2])
        return MATRICES * pixels / side**2 * c * k / PRODUCTS
    tiles = work.batch_size * math.prod(-(-n // side) for n in shape.out[:2])
    return winograd_ns(tiles, c, k, keeps_weights=work.keeps_weights) / ACCEPTED


def winograd_ns(tiles: int, c: int, k: int, *, keeps_weights: bool) -> float:
    """Return the time of some tiles with all filters.

    Args:
        tiles: output tiles.
        c, k: input channels, and filters with whole vectors.
        keeps_weights: True if transformed weights are kept from launch to launch.
    """
    transform = 0.0 if keeps_weights else WEIGHTS * c * k
    return transform + share_ns(tiles, c, k, keeps_weights=True)


def share_ns(tiles: int, c: int, k: int, *, keeps_weights: bool) -> float:
    """Return the time in which a thread computes `k` filters of some tiles.

    Args:
        tiles, c, k: as for `winograd_ns`.
        keeps_weights: False if other threads have just written the transformed weights.
    """
    rows = -(-tiles // FEWEST_ROWS) * FEWEST_ROWS
    rate = PRODUCTS if k > WIDTH else SINGLE_VECTOR_PRODUCTS
    products = MATRICES * rows * c * k / rate
    weight_bytes = 4 * MATRICES * c * k
    if are_near(c, k):
        reading = weight_bytes / (FROM_L2 if keeps_weights else FROM_L3)
    else:
        reading = weight_bytes / (FROM_L3 if keeps_weights else FROM_OTHERS)
    return tiles * (INPUT * c + OUTPUT * k) + max(products, reading)


def parts_of_filters(
    rows: int, across: int, c: int, k: int, threads: int, *, keeps_weights: bool
) -> int:
    """Return the number of parts into which the filters are divided, so that all threads have work.

    With few tiles, a thread that computes all filters of some tiles reads all transformed weights,
    and its register tiles are not filled. 256 → 256 channels, 8 × 8 maps, 8 samples: 205 instead of
    400 µs of the slowest of 8 threads (Intel Xeon, AVX-512, each thread's share timed alone).

    Args:
        rows: rows of tiles of all samples.
        across: tiles of a row.
        c, k: input channels, and filters with whole vectors.
        threads: number of threads.
        keeps_weights: as for `share_ns`.
    """
    vectors = k // compiled_registers().width
    if threads == 1 or (are_near(c, k) and rows >= BALANCED * threads):
        return 1

    def slowest_ns(parts: int) -> float:
        items = rows * parts
        largest = -(-items // min(threads, items))
        filters = -(-vectors // parts) * compiled_registers().width
        whole, rest = divmod(largest, rows)
        pieces = [rows] * whole + [rest] * (rest > 0)
        if whole == 0 and rows % rest:  # A range of items ends in the next part of the filters.
            pieces = [rest - rest // 2, rest // 2]
        return sum(share_ns(m * across, c, filters, keeps_weights=keeps_weights) for m in pieces)

    best = min(range(1, min(vectors, MOST_PARTS) + 1), key=slowest_ns)
    return best if slowest_ns(1) - slowest_ns(best) > MIN_GAIN_NS else 1


def rows_of_gradient(rows: int, tiles: int, c: int, k: int, threads: int) -> int:
    """Return the rows of partial sums of a weight gradient with large sums.

    If each thread sums some samples for all filters, its sums exceed the L2 cache, and those of all
    threads are added afterwards. With fewer rows, several threads sum the same samples for some of
    the filters each. Then they all transform the inputs of these samples. 128 samples, slowest of
    16 threads (Intel Xeon, AVX-512, each thread's share timed alone): 512 → 512 channels, 4 × 4
    maps, 1 instead of 16 rows, 4.3 instead of 10.6 ms; 256 → 256 channels, 8 × 8 maps, 4 rows, 2.5
    instead of 3.4 ms.

    Args:
        rows: rows if samples are divided first, see `planning.rows_of_partial_sums`.
        tiles: output tiles of all samples.
        c, k: input channels, and filters with whole vectors.
        threads: number of threads.
    """
    if are_near(c, k):
        return rows
    sum_bytes = 4 * MATRICES * c * k

    def share_of_thread_ns(rows: int) -> float:
        parts = threads / rows
        return tiles / rows * INPUT * c + SUM_PASSES * sum_bytes / parts / FROM_L3

    vectors = k // compiled_registers().width
    divisors = [n for n in range(1, rows + 1) if threads % n == 0 and threads // n <= vectors]
    best = min(divisors, key=share_of_thread_ns, default=rows)
    pays = share_of_thread_ns(best) < ACCEPTED_ROWS * share_of_thread_ns(rows)
    return best if pays else rows
