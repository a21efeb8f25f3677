"""Grouped and depthwise convolution, with loops over the channels of a pixel.

Arrays are those of `direct_convolution`; the weights are (R, S, C / groups, K). Items are rows of
the result: of y, of dx, and of the filters (r, s) for each row of partial sums.

In a depthwise convolution with one filter for each channel, the loop over channels is the inner
one. Otherwise it is the loop over the filters, or over the channels, of a group.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dptrain.native.jit import inlined, kernel


class GroupedGeometry(NamedTuple):
    """Padding, strides and dilations of a grouped convolution."""

    pad_top: int
    pad_left: int
    stride_v: int
    stride_h: int
    dilation_v: int
    dilation_h: int
    groups: int


@inlined
def _span(pad, stride, tap, size, out):
    """Return the first position of the output, and the end, at which a tap is inside the map.

    `tap` is the distance of the tap from the first one of the filter.
    """
    first = max(0, -((tap - pad) // stride)) if tap < pad else 0
    last = (size - 1 + pad - tap) // stride + 1 if size - 1 + pad >= tap else 0
    return first, max(first, min(out, last))


@inlined
def _add_forward(x, w, y, group, filters):
    """Add the products of a pixel x (C,) with a tap w (C / groups, K) to y (K,)."""
    if group == 1 and filters == 1:
        for k in range(np.uintp(len(y))):
            y[k] += x[k] * w[0, k]
        return
    for g in range(len(y) // filters):
        result = y[g * filters : (g + 1) * filters]
        for c in range(group):
            value = x[g * group + c]
            taps = w[c, g * filters : (g + 1) * filters]
            for k in range(np.uintp(filters)):
                result[k] += value * taps[k]


@inlined
def _add_backward_input(dy, w, dx, group, filters):
    """Add the products of a pixel dy (K,) with a tap w (C / groups, K) to dx (C,)."""
    if group == 1 and filters == 1:
        for k in range(np.uintp(len(dy))):
            dx[k] += dy[k] * w[0, k]
        return
    for g in range(len(dy) // filters):
        for c in range(group):
            total = np.float32(0.0)
            for k in range(g * filters, (g + 1) * filters):
                total += dy[k] * w[c, k]
            dx[g * group + c] += total


@inlined
def _add_backward_weight(x, dy, dw, group, filters):
    """Add the products of pixels x (C,) and dy (K,) to a tap dw (C / groups, K)."""
    if group == 1 and filters == 1:
        row = dw[0]
        for k in range(np.uintp(len(dy))):
            row[k] += x[k] * dy[k]
        return
    for g in range(len(dy) // filters):
        gradient = dy[g * filters : (g + 1) * filters]
        for c in range(group):
            value = x[g * group + c]
            row = dw[c, g * filters : (g + 1) * filters]
            for k in range(np.uintp(filters)):
                row[k] += value * gradient[k]


@kernel
def grouped_forward(items, x, w, b, y, geo, relu):
    """Compute y; items are rows of y."""
    _, height, width, channels = x.shape
    _, h_out, w_out, k = y.shape
    group, filters = channels // geo.groups, k // geo.groups
    for item in range(items.start, items.stop):
        n, i = item // h_out, item % h_out
        for j in range(w_out):
            result = y[n, i, j]
            for q in range(np.uintp(k)):
                result[q] = b[q]
        for r in range(w.shape[0]):
            row = i * geo.stride_v + r * geo.dilation_v - geo.pad_top
            if row < 0 or row >= height:
                continue
            for s in range(w.shape[1]):
                offset = s * geo.dilation_h
                first, last = _span(geo.pad_left, geo.stride_h, offset, width, w_out)
                for j in range(first, last):
                    column = j * geo.stride_h + offset - geo.pad_left
                    _add_forward(x[n, row, column], w[r, s], y[n, i, j], group, filters)
        if relu:
            for j in range(w_out):
                result = y[n, i, j]
                for q in range(np.uintp(k)):
                    result[q] = np.float32(0.0) if result[q] <= 0.0 else result[q]


@kernel
def grouped_backward_input(items, dy, w, dx, geo, adds):
    """Compute dx, or add it if `adds`; items are rows of dx."""
    _, height, width, channels = dx.shape
    _, h_out, w_out, k = dy.shape
    group, filters = channels // geo.groups, k // geo.groups
    for item in range(items.start, items.stop):
        n, h = item // height, item % height
        if not adds:
            dx[n, h] = 0.0
        for r in range(w.shape[0]):
            above = h + geo.pad_top - r * geo.dilation_v
            i = above // geo.stride_v
            if above < 0 or above % geo.stride_v or i >= h_out:
                continue
            for s in range(w.shape[1]):
                offset = s * geo.dilation_h
                first, last = _span(geo.pad_left, geo.stride_h, offset, width, w_out)
                for j in range(first, last):
                    column = j * geo.stride_h + offset - geo.pad_left
                    _add_backward_input(dy[n, i, j], w[r, s], dx[n, h, column], group, filters)


@kernel
def grouped_backward_weight(items, x, dy, partial, bounds, shape, geo):
    """Compute dw and db of the samples of each row of partial; items are taps (r, s) of each row.

    Args:
        partial: (rows, R·S·C/groups·K + K); row i is of samples bounds[i] to bounds[i + 1].
        shape: (R, S, C / groups, K).
    """
    _, height, width, _ = x.shape
    _, h_out, w_out, k = dy.shape
    window_r, window_s, group, _ = shape
    taps, filters = window_r * window_s, k // geo.groups
    for item in range(items.start, items.stop):
        index, tap = item // taps, item % taps
        below, offset = tap // window_s * geo.dilation_v, tap % window_s * geo.dilation_h
        sums = partial[index, tap * group * k : (tap + 1) * group * k]
        sums[:] = 0.0
        dw, db = sums.reshape(group, k), partial[index, taps * group * k :]
        first, last = _span(geo.pad_left, geo.stride_h, offset, width, w_out)
        if tap == 0:
            db[:] = 0.0
        for n in range(bounds[index], bounds[index + 1]):
            for i in range(h_out):
                row = i * geo.stride_v + below - geo.pad_top
                if 0 <= row < height:
                    for j in range(first, last):
                        column = j * geo.stride_h + offset - geo.pad_left
                        _add_backward_weight(x[n, row, column], dy[n, i, j], dw, group, filters)
                if tap == 0:
                    for j in range(w_out):
                        gradient = dy[n, i, j]
                        for q in range(np.uintp(k)):
                            db[q] += gradient[q]
