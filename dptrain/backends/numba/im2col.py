"""Implicit im2col: geometry, scratch, offset tables, and the work for one sample.

Convolution kernels do not copy patches into a matrix. A *pixel table* has the offset of each
pixel's patch in a map, a *filter table* the offset of element (r, s, c) in a patch. Distances are
in elements.
"""

from __future__ import annotations

from typing import NamedTuple

from dptrain.backends.numba.jit import expanded, inlined
from dptrain.backends.numba.microkernels import (
    NO_LOWER_BOUND,
    multiply_adjacent,
    multiply_spaced,
)
from dptrain.backends.numba.pooling_windows import maximum_of_windows, scatter_to_windows
from dptrain.backends.numba.vector import copy, transpose

BAND = 36 * 1024
"""Bytes of x and dz that the weight gradient processes at a time, so that they stay in the L1
cache."""


class ConvGeometry(NamedTuple):
    """Padding, strides and filter size of a convolution."""

    pad_top: int
    pad_left: int
    stride_v: int
    stride_h: int
    r: int
    s: int


class PoolGeometry(NamedTuple):
    """Padding, strides and window size of pooling, and the size (H, W) of its input."""

    pad_top: int
    pad_left: int
    stride_v: int
    stride_h: int
    window_v: int
    window_h: int
    height: int
    width: int


def conv_geometry(
    pads: tuple[int, int], strides: tuple[int, int], window: tuple[int, int]
) -> ConvGeometry:
    """Return the geometry of a convolution; every pair is (vertical, horizontal)."""
    return ConvGeometry(*pads, *strides, *window)


def pool_geometry(
    pads: tuple[int, int],
    strides: tuple[int, int],
    window: tuple[int, int],
    maps: tuple[int, int],
) -> PoolGeometry:
    """Return the geometry of pooling; every pair is (vertical, horizontal)."""
    return PoolGeometry(*pads, *strides, *window, *maps)


def conv_scratch(
    pads: tuple[int, int],
    strides: tuple[int, int],
    window: tuple[int, int],
    x_maps: tuple[int, int, int],
    y_maps: tuple[int, int, int],
    pool_height: int = 0,
) -> tuple[int, int, int]:
    """Return scratch elements per thread for forward, weight gradient and input gradient.

    Args:
        pads: (top, left).
        strides: (vertical, horizontal).
        window: (R, S).
        x_maps: (H, W, C).
        y_maps: (Ho, Wo, K) of the convolution, before pooling.
        pool_height: height of the window of fused pooling; 0 without pooling.
    """
    (h_in, w_in, c), (h_out, w_out, k) = x_maps, y_maps
    pixels, patch = h_out * w_out, window[0] * window[1] * c
    padded = ((h_out - 1) * strides[0] + window[0]) * ((w_out - 1) * strides[1] + window[1])
    rows = max((h_in - 1 + pads[0]) // strides[0] + 1, h_out) + (window[0] - 1) // strides[0]
    columns = max((w_in - 1 + pads[1]) // strides[1] + 1, w_out) + (window[1] - 1) // strides[1]
    return (
        padded * c + 2 * pixels + patch + pool_height * w_out * k,
        padded * c + 2 * patch + pixels + (pixels * k if pool_height else 1),
        rows * columns * k + patch * k + 2 * h_in * w_in + window[0] * window[1] * k + k,
    )


@expanded
def copy_padded(source, start, maps, target, rows, columns, top, left):  # type: ignore[no-untyped-def]
    """Copy maps (height, width, channels) into zeroed maps (rows, columns, channels)."""
    height, width, channels = maps
    first, last = max(0, -left), min(width, columns - left)
    for i in range(max(0, -top), min(height, rows - top)):
        s = start + (i * width + first) * channels
        t = ((i + top) * columns + first + left) * channels
        copy(source, s, target, t, max(0, last - first) * channels)


@expanded
def fill_pixels(height, width, down, across, table):  # type: ignore[no-untyped-def]
    """Fill the pixel table of a map; patches are `down` and `across` elements from each other."""
    for i in range(height):
        for j in range(width):
            table[i * width + j] = i * down + j * across


@expanded
def fill_filter(r, s, down, table):  # type: ignore[no-untyped-def]
    """Fill the filter table: r rows of s adjacent elements; rows are `down` elements from each
    other.
    """
    for i in range(r):
        for j in range(s):
            table[i * s + j] = i * down + j


@expanded
def fill_ramp(scale, table):  # type: ignore[no-untyped-def]
    """Fill a table with multiples of `scale`."""
    for i in range(len(table)):
        table[i] = i * scale


@expanded
def padded_maps(h_out, w_out, geometry):  # type: ignore[no-untyped-def]
    """Return the height and width that the patches cover."""
    _, _, down, across, r, s = geometry
    return (h_out - 1) * down + r, (w_out - 1) * across + s


@expanded
def padded_gradient(h_in, w_in, h_out, w_out, geometry):  # type: ignore[no-untyped-def]
    """Return the height and width of zero-padded dy for the input gradient."""
    top, left, down, across, r, s = geometry
    rows = max((h_in - 1 + top) // down + 1, h_out) + (r - 1) // down
    return rows, max((w_in - 1 + left) // across + 1, w_out) + (s - 1) // across


@expanded
def is_inside(geometry, h_in, w_in, rows, columns):  # type: ignore[no-untyped-def]
    """Return whether the map contains all rows and columns of the patches, so that no copy is
    needed.
    """
    return geometry.pad_top == 0 and geometry.pad_left == 0 and rows <= h_in and columns <= w_in


@inlined
def rows_alike(i, rows, stride, above, r, height):  # type: ignore[no-untyped-def]
    """Return the filter rows that meet the map at row i of the output, and the range of such rows.

    Skipping products with rows of padding saves 10% for a 5 × 5 filter on 12 rows.

    Args:
        i, rows: row and number of rows of the output.
        stride: vertical stride.
        above: row of the map under the filter's first row.
        r: rows of the filter.
        height: rows of the map.

    Returns:
        First and last filter row, and the first output row for which they differ.
    """
    first, last = min(r, max(0, -above)), min(r, height - above)
    stop = i
    while stop < rows:
        row = above + (stop - i) * stride
        if min(r, max(0, -row)) != first or min(r, height - row) != last:
            break
        stop += 1
    return first, max(first, last), max(i + 1, stop)


@inlined
def taps(size, phase, stride):  # type: ignore[no-untyped-def]
    """Return how many numbers of range(size) have the remainder `phase` modulo `stride`."""
    return (size - phase + stride - 1) // stride if phase < size else 0


@expanded
def unpool(dy, argmax, start, h_pool, w_pool, k, pool, target, columns, top, left, sums):  # type: ignore[no-untyped-def]
    """Write dy of one sample to the positions of the maxima, in `target` (…, columns, K), at (top,
    left).

    Elements outside all windows are unchanged. The gradients are also added to sums (K,).
    """
    high, wide, h_out, w_out = pool.window_v, pool.window_h, pool.height, pool.width
    overlap = pool.stride_v < high or pool.stride_h < wide
    if overlap:
        for i in range(h_out):
            row = ((i + top) * columns + left) * k
            target[row : row + w_out * k] = 0
    for i in range(h_pool):
        row = i * pool.stride_v - pool.pad_top
        j = 0
        while j < w_pool:
            column = j * pool.stride_h - pool.pad_left
            begin, end, count = max(0, -column), min(wide, w_out - column), 1
            if begin == 0 and end == wide:
                # Process all windows up to the last complete one together.
                count = max(1, min(w_pool, (w_out - wide + pool.pad_left) // pool.stride_h + 1) - j)
            window = start + (i * w_pool + j) * k
            scatter_to_windows(
                *(target, ((row + top) * columns + column + left) * k, dy, window, argmax, window),
                *(sums, 0, overlap, max(0, -row), min(high, h_out - row), begin, end),
                *(wide, columns * k, pool.stride_h, k, count),
            )
            j += count


@expanded
def pool_row(band, origin, first, last, w_out, pitch, w_pool, k, pool, y, argmax, start):  # type: ignore[no-untyped-def]
    """Compute the maxima of one row of windows, of which rows `first` to `last` exist.

    The first row starts at band[origin], even if it does not exist; rows are `pitch` pixels apart.
    """
    wide = pool.window_h
    j = 0
    while j < w_pool:
        column = j * pool.stride_h - pool.pad_left
        begin, end, count = max(0, -column), min(wide, w_out - column), 1
        if begin == 0 and end == wide:
            # Process all windows up to the last complete one together.
            count = max(1, min(w_pool, (w_out - wide + pool.pad_left) // pool.stride_h + 1) - j)
        maximum_of_windows(
            *(band, origin + column * k, y, start + j * k, argmax, start + j * k),
            *(first, last, begin, end, wide, pitch * k, pool.stride_h, k, count),
        )
        j += count


@inlined
def band_rows(w_out, c, k):  # type: ignore[no-untyped-def]
    """Return the rows of x and dz that fit the L1 cache during the weight gradient."""
    # For each pixel a tile reads one cache line of x and two of dz, if there are enough channels.
    pixel = min(64, 4 * c) + min(128, 4 * k)
    return max(1, BAND // pixel // w_out)


@expanded
def add_weight_gradient(  # type: ignore[no-untyped-def]
    a, a_start, dz, dz_start, tables, first, height, w_out, r, s, c, k, sums
):
    """Add the contribution of `height` rows of a sample's dz to dw, in sums (R·S·C, K).

    Args:
        tables: filter table, row table of dw and pixel table, one after another.
        first: number of the first pixel of dz in the map.
    """
    patch = r * s * c
    step = band_rows(w_out, c, k) * w_out
    for p in range(0, height * w_out, step):
        multiply_adjacent(
            (a, a_start),
            (tables, 0, 1),
            (tables, 2 * patch + first + p, 1),
            (dz, dz_start + p * k, k),
            (sums, 0, 1),
            (sums, 0),
            (tables, patch, 1),
            (patch, min(step, height * w_out - p), k),
            NO_LOWER_BOUND,
            s * c,
        )


@inlined
def pack_flipped(w, shape, geometry, packed):  # type: ignore[no-untyped-def]
    """Pack the weights for the input gradient: by phase, flipped, as (…, K, C)."""
    r, s, c, k = shape
    down, across = geometry.stride_v, geometry.stride_h
    offset = 0
    for f in range(down):
        for g in range(across):
            for i in range(taps(r, f, down) - 1, -1, -1):
                for j in range(taps(s, g, across) - 1, -1, -1):
                    source = ((f + i * down) * s + g + j * across) * c * k
                    transpose(w, source, k, packed, offset, c, c, k)
                    offset += c * k


@inlined
def fill_phases(h_in, w_in, c, k, columns, geometry, a_rows, c_rows, a_steps):  # type: ignore[no-untyped-def]
    """Fill the pixel tables of dz and dx by phase, and the filter tables.

    Row h of the input meets only the filter rows f, f + stride, … with f = (h + top) mod stride. So
    each phase (f, g) is a correlation of stride 1.
    """
    top, left, down, across, r, s = geometry
    pixel, step = 0, 0
    for f in range(down):
        for g in range(across):
            # Padded dz has (r − 1) // down rows above, as the phase with the most taps requires.
            row_taps, column_taps = taps(r, f, down), taps(s, g, across)
            for h in range((f - top) % down, h_in, down):
                row = (h + top - f) // down - row_taps + 1 + (r - 1) // down
                for v in range((g - left) % across, w_in, across):
                    column = (v + left - g) // across - column_taps + 1 + (s - 1) // across
                    a_rows[pixel] = (row * columns + column) * k
                    c_rows[pixel] = (h * w_in + v) * c
                    pixel += 1
            size = row_taps * column_taps * k
            fill_filter(row_taps, column_taps * k, columns * k, a_steps[step : step + size])
            step += size


@expanded
def correlate_phases(  # type: ignore[no-untyped-def]
    dz, h_out, h_in, w_in, c, k, geometry, packed, a_rows, c_rows, a_steps, dx, dx_start
):
    """Compute dx of one sample from its padded dz."""
    top, left, down, across, r, s = geometry
    pixel, step = 0, 0
    # Pixels of a phase are adjacent only if it is the only phase.
    run = w_in if down * across == 1 else 1
    for f in range(down):
        for g in range(across):
            pixels = taps(h_in, (f - top) % down, down) * taps(w_in, (g - left) % across, across)
            size = taps(r, f, down) * taps(s, g, across) * k
            i = 0
            while i < h_in:
                first, last, stop, count = 0, taps(r, f, down), h_in, pixels
                if run > 1:
                    first, last, stop = rows_alike(i, h_in, 1, i + top - (r - 1), r, h_out)
                    count = (stop - i) * w_in
                skipped = first * s * k
                multiply_spaced(
                    (dz, 0),
                    (a_rows, pixel + i * w_in, 1),
                    (a_steps, step + skipped, 1),
                    (packed, (step + skipped) * c, c),
                    (packed, 0, -1),
                    (dx, dx_start),
                    (c_rows, pixel + i * w_in, 1),
                    (count, (last - first) * taps(s, g, across) * k, c),
                    NO_LOWER_BOUND,
                    run,
                )
                i = stop
            pixel += pixels
            step += size
