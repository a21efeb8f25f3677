"""Grouped and depthwise convolution: products of the padded map of each group.

Arrays are those of `direct_convolution`; the weights are (R, S, C / groups, K). An item copies the
channels of a group of a sample next to each other, with zeros around them (`_load_group`). Then
one table of offsets describes the patches of all pixels, also at the borders, and the products of
`microkernels` compute the group. In a depthwise convolution, a block of channels takes the role of
a group, and each channel is multiplied with its own filter (`multiply_diagonal`).

The input gradient is the same product: of dy with the transposed weights. With strides there is one
*phase* for each remainder of a row and a column, each with some of the filters' elements.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.numba.convolution.microkernels import (
    NO_LOWER_BOUND,
    multiply,
    multiply_diagonal,
)
from dptrain.backends.numba.vector import copy
from dptrain.native.jit import inlined, kernel


class GroupedGeometry(NamedTuple):
    """Sizes and tables of the products of a group.

    Attributes:
        above, left: rows and columns of the padded map before the first ones of the operand.
        height, width: of the padded map.
        channels, filters: of a group of the operand and of the result, or of a block of channels.
        groups: number of groups or blocks.
        depthwise: 1 if each channel has its own filter, and otherwise 0.
        phases: int64 (phases, 13), see `grouped_planning.phase_row`.
        tables: int32, offsets of pixels, of elements of the filters, and of results.
    """

    above: int
    left: int
    height: int
    width: int
    channels: int
    filters: int
    groups: int
    depthwise: int
    phases: NDArray[np.int64]
    tables: NDArray[np.int32]


@inlined
def _load_group(x, shape, n, group, geo, padded):
    """Copy the channels of a group of sample n to the padded map, and return their number."""
    _, height, width, channels = shape
    count, pitch = min(geo.channels, channels - group * geo.channels), geo.channels
    left = min(max(0, geo.left), geo.width)
    right = max(left, min(geo.width, geo.left + width))
    for i in range(geo.height):
        row, at = i - geo.above, i * geo.width * pitch
        if row < 0 or row >= height:
            padded[at : at + geo.width * pitch] = 0.0
            continue
        padded[at : at + left * pitch] = 0.0
        source = ((n * height + row) * width - geo.left) * channels + group * geo.channels
        for j in range(left, right):
            copy(x, source + j * channels, padded, at + j * pitch, count)
        padded[at + right * pitch : at + geo.width * pitch] = 0.0
    return count


@kernel
def grouped_product(items, x, w, b, y, geo, adds, lower_bound, scratch):
    """Compute y, or add it if `adds`; items are groups of samples.

    Args:
        x: (N, H, W, C), the operand: x, or dy for the input gradient.
        w: flat (elements of the filters, C / groups, K).
        b: (K,), the bias or zeros.
        y: (N, Ho, Wo, K), the result.
    """
    padded, x_flat, y_flat, k = scratch[items.thread], x.reshape(-1), y.reshape(-1), y.shape[3]
    sample, tables = y.shape[1] * y.shape[2] * k, geo.tables
    for item in range(items.start, items.stop):
        n, group = item // geo.groups, item % geo.groups
        _load_group(x_flat, x.shape, n, group, geo, padded)
        first = group * geo.filters
        columns = min(geo.filters, k - first)
        for phase in geo.phases:
            lines, chunk, pixels, steps, a, a_chunk, c, c_chunk, row, patches, taps, results = (
                phase[0], phase[1], phase[2], phase[3], phase[4], phase[5], phase[6], phase[7],
                phase[8], phase[9], phase[10], phase[11],
            )  # fmt: skip
            for line in range(0, lines, chunk):
                start = n * sample + c + line // chunk * c_chunk + first
                d, d_start, d_row = b, first, 0
                if adds:
                    d, d_start, d_row = y_flat, start, 1
                shape = min(chunk, lines - line) * pixels, steps, columns
                operand, filters = (padded, a + line // chunk * a_chunk), (w, row * k + first, k)
                addend, result = (d, d_start, d_row), (y_flat, start)
                offsets, elements = (tables, patches, 1), (tables, taps, 1)
                places = tables, results, 1
                if geo.depthwise:
                    multiply_diagonal(
                        operand, offsets, elements, filters, addend, result, places, shape,
                        lower_bound,
                    )  # fmt: skip
                else:
                    multiply(
                        operand, offsets, elements, filters, addend, result, places, shape,
                        lower_bound,
                    )  # fmt: skip


@kernel
def transpose_filters(items, w, order, groups, target):
    """Write (elements, K / groups, C) of w (elements, C / groups, K); items are elements.

    Element e of the result is element order[e] of w.
    """
    group, filters = w.shape[1], w.shape[2] // groups
    for e in range(items.start, items.stop):
        source, result = w[order[e]], target[e]
        for k in range(filters):
            for g in range(groups):
                for c in range(group):
                    result[k, g * group + c] = source[c, g * filters + k]


@kernel
def grouped_backward_weight(items, x, dy, partial, bounds, geo, has_bias, scratch):
    """Compute dw and db of the samples of each row of partial; items are groups of each row.

    Args:
        partial: (rows, R·S·C/groups·K + K); row i is of samples bounds[i] to bounds[i + 1].
        has_bias: whether db is computed.
    """
    padded, x_flat, dy_flat = scratch[items.thread], x.reshape(-1), dy.reshape(-1)
    k, phase, tables = dy.shape[3], geo.phases[0], geo.tables
    lines, chunk, pixels, rows, a_chunk = phase[0], phase[1], phase[2], phase[3], phase[5]
    for item in range(items.start, items.stop):
        index, group = item // geo.groups, item % geo.groups
        sums, first = partial[index], group * geo.filters
        columns, d_row = min(geo.filters, k - first), -1
        if bounds[index] == bounds[index + 1]:
            for row in range(rows):
                sums[row * k + first : row * k + first + columns] = 0.0
        for n in range(bounds[index], bounds[index + 1]):
            _load_group(x_flat, x.shape, n, group, geo, padded)
            for line in range(0, lines, chunk):
                start = (n * lines + line) * pixels * k + first
                shape = rows, min(chunk, lines - line) * pixels, columns
                operand, gradient = (padded, line // chunk * a_chunk), (dy_flat, start, k)
                addend, result = (sums, first, d_row), (sums, first)
                elements, offsets = (tables, phase[10], 1), (tables, phase[9], 1)
                places = tables, phase[12], 1
                if geo.depthwise:
                    multiply_diagonal(
                        operand, elements, offsets, gradient, addend, result, places, shape,
                        NO_LOWER_BOUND,
                    )  # fmt: skip
                else:
                    multiply(
                        operand, elements, offsets, gradient, addend, result, places, shape,
                        NO_LOWER_BOUND,
                    )  # fmt: skip
                d_row = 1
        if has_bias:
            db = sums[len(sums) - k + first : len(sums) - k + first + columns]
            db[:] = 0.0
            for pixel in range(bounds[index] * lines * pixels, bounds[index + 1] * lines * pixels):
                for q in range(np.uintp(columns)):
                    db[q] += dy_flat[pixel * k + first + q]
