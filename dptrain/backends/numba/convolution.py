"""Convolution, forward and backward, as loops over register tiles.

Layouts: activations (N, H, W, C), weights (R, S, C, K), all float32 and contiguous. A row of a
tile is a pixel (forward, backward by the input) or an element (r, s, c) of the filters (backward
by the weights); columns are output channels, or input channels in backward by the input. Nothing
is unrolled into a matrix: the pixels (s, c) that a filter row meets lie side by side already, so
tables of offsets say where each tile row starts.

Every kernel takes `(start, stop, thread)` first: a range of samples and the number of the thread
that computes it. `scratch` has one row of float32 for each thread, at least as long as
`conv_scratch` says; `geometry` comes from `conv_geometry`, `pool_geometry` from the function of
that name.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from dptrain.backends.numba.jit import inlined, kernel
from dptrain.backends.numba.microkernels import multiply

NOTHING = np.float32(-np.inf)
"""The floor that changes nothing."""

NO_GRADIENT = 255
"""Position in a window that stands for no element: the maximum was not above 0."""


def conv_geometry(
    pads: tuple[int, int], strides: tuple[int, int], window: tuple[int, int]
) -> NDArray[np.int64]:
    """What kernels ask of a convolution: (top, left, vertical, horizontal, R, S)."""
    return np.array([*pads, *strides, *window], np.int64)


def pool_geometry(
    pads: tuple[int, int],
    strides: tuple[int, int],
    window: tuple[int, int],
    maps: tuple[int, int],
) -> NDArray[np.int64]:
    """What they ask of pooling: (top, left, vertical, horizontal, R, S, height, width pooled)."""
    return np.array([*pads, *strides, *window, *maps], np.int64)


def conv_scratch(
    pads: tuple[int, int],
    strides: tuple[int, int],
    window: tuple[int, int],
    x_maps: tuple[int, int, int],
    y_maps: tuple[int, int, int],
    pool_height: int = 0,
) -> tuple[int, int, int]:
    """Elements of scratch for each thread: forward, backward by weights, backward by input.

    Args:
        pads: top and left.
        strides: vertical and horizontal.
        window: (R, S).
        x_maps: (H, W, C).
        y_maps: (Ho, Wo, K) of the convolution, before pooling.
        pool_height: height of the window of fused pooling; 0 where there is none.
    """
    (h_in, w_in, c), (h_out, w_out, k) = x_maps, y_maps
    pixels, taps, z = h_out * w_out, window[0] * window[1], h_out * w_out * k
    padded = ((h_out - 1) * strides[0] + window[0]) * ((w_out - 1) * strides[1] + window[1]) * c
    rows = max((h_in - 1 + pads[0]) // strides[0] + 1, h_out) + (window[0] - 1) // strides[0]
    columns = max((w_in - 1 + pads[1]) // strides[1] + 1, w_out) + (window[1] - 1) // strides[1]
    return (
        padded + 2 * pixels + pool_height * w_out * k,
        padded + 2 * taps * c + (z if pool_height else 0),
        rows * columns * k + taps * c * k + 2 * h_in * w_in,
    )


@inlined
def _copy_padded(source, start, height, width, channels, target, rows, columns, top, left):  # type: ignore[no-untyped-def]
    """Copy maps (height, width, channels) into zeroed maps (rows, columns, channels)."""
    for i in range(max(0, -top), min(height, rows - top)):
        first, last = max(0, -left), min(width, columns - left)
        s = start + (i * width + first) * channels
        t = ((i + top) * columns + first + left) * channels
        for j in range(max(0, last - first) * channels):
            target[t + j] = source[s + j]


@inlined
def _pixel_tables(height, width, down, across, a_rows, ring, row, pixel, c_rows):  # type: ignore[no-untyped-def]
    """Where pixel (i, j) of an output starts in A, and in C, whose rows lie in a ring."""
    for i in range(height):
        for j in range(width):
            a_rows[i * width + j] = i * down + j * across
            c_rows[i * width + j] = (i % ring) * row + j * pixel


@kernel
def conv2d_forward(start, stop, thread, x, w, b, y, geometry, relu, scratch):  # type: ignore[no-untyped-def]
    """y[n, i, j, k] = b[k] + Σ x[n, i·stride + r − top, j·stride + s − left, c] · w[r, s, c, k].

    Args:
        x: (N, H, W, C).
        w: (R, S, C, K).
        b: (K,).
        y: (N, Ho, Wo, K), written.
        relu: whether y is max(y, 0) of that.
    """
    top, left, vertical, horizontal = geometry[0], geometry[1], geometry[2], geometry[3]
    _, h_in, w_in, c = x.shape
    r, s, _, k = w.shape
    _, h_out, w_out, _ = y.shape
    rows, columns = (h_out - 1) * vertical + r, (w_out - 1) * horizontal + s
    pixels, size = h_out * w_out, rows * columns * c
    mine = scratch[thread]
    padded, tables = mine[:size], mine[size : size + 2 * pixels].view(np.int32)
    x_flat, w_flat, y_flat = x.reshape(-1), w.reshape(-1), y.reshape(-1)
    pads = top > 0 or left > 0 or rows > h_in or columns > w_in
    if not pads:
        columns = w_in
    a_rows, c_rows = tables[:pixels], tables[pixels:]
    _pixel_tables(
        h_out, w_out, vertical * columns * c, horizontal * c, a_rows, h_out, w_out * k, k, c_rows
    )
    if pads:
        padded[:] = 0
    floor = np.float32(0) if relu else NOTHING
    for n in range(start, stop):
        a, a_start = x_flat, n * h_in * w_in * c
        if pads:
            _copy_padded(x_flat, a_start, h_in, w_in, c, padded, rows, columns, top, left)
            a, a_start = padded, 0
        multiply(
            a,
            a_start,
            a_rows,
            0,
            1,
            1,
            s * c,
            columns * c,
            r,
            w_flat,
            0,
            k,
            s * c * k,
            b,
            0,
            0,
            y_flat,
            n * pixels * k,
            c_rows,
            0,
            1,
            pixels,
            k,
            floor,
        )


@kernel
def conv2d_relu_pool_forward(
    start, stop, thread, x, w, b, y, argmax, geometry, pool_geometry, scratch
):  # type: ignore[no-untyped-def]
    """Convolution, ReLU and max pooling in one; the convolution's own output is never stored.

    Args:
        x, w, b: as in `conv2d_forward`.
        y: (N, Hp, Wp, K) the pooled maps, written.
        argmax: uint8 like y, written: which element of its window each maximum is, counted along
            the window's rows, the first among equals; `NO_GRADIENT` where it is not above 0.
    """
    top, left, vertical, horizontal = geometry[0], geometry[1], geometry[2], geometry[3]
    pool_top, pool_left, pool_vertical, pool_horizontal = (
        pool_geometry[0],
        pool_geometry[1],
        pool_geometry[2],
        pool_geometry[3],
    )
    high, wide, h_out, w_out = (
        pool_geometry[4],
        pool_geometry[5],
        pool_geometry[6],
        pool_geometry[7],
    )
    _, h_in, w_in, c = x.shape
    r, s, _, k = w.shape
    _, h_pool, w_pool, _ = y.shape
    rows, columns = (h_out - 1) * vertical + r, (w_out - 1) * horizontal + s
    pixels, size = h_out * w_out, rows * columns * c
    mine = scratch[thread]
    padded, tables = mine[:size], mine[size : size + 2 * pixels].view(np.int32)
    ring = mine[size + 2 * pixels :]
    x_flat, w_flat, y_flat = x.reshape(-1), w.reshape(-1), y.reshape(-1)
    argmax_flat = argmax.reshape(-1)
    pads = top > 0 or left > 0 or rows > h_in or columns > w_in
    if not pads:
        columns = w_in
    a_rows, c_rows = tables[:pixels], tables[pixels:]
    _pixel_tables(
        h_out, w_out, vertical * columns * c, horizontal * c, a_rows, high, w_out * k, k, c_rows
    )
    if pads:
        padded[:] = 0
    for n in range(start, stop):
        a, a_start = x_flat, n * h_in * w_in * c
        if pads:
            _copy_padded(x_flat, a_start, h_in, w_in, c, padded, rows, columns, top, left)
            a, a_start = padded, 0
        ready = 0
        for i in range(h_pool):
            # The rows of the convolution that this row of windows meets: some are there already.
            first = max(0, i * pool_vertical - pool_top)
            last = min(h_out, i * pool_vertical - pool_top + high)
            ready = max(ready, first)
            if ready < last:
                multiply(
                    a,
                    a_start,
                    a_rows,
                    ready * w_out,
                    1,
                    1,
                    s * c,
                    columns * c,
                    r,
                    w_flat,
                    0,
                    k,
                    s * c * k,
                    b,
                    0,
                    0,
                    ring,
                    0,
                    c_rows,
                    ready * w_out,
                    1,
                    (last - ready) * w_out,
                    k,
                    np.float32(0),
                )
                ready = last
            for j in range(w_pool):
                left_edge = j * pool_horizontal - pool_left
                _pool_pixel(
                    ring,
                    first,
                    last,
                    max(0, left_edge),
                    min(w_out, left_edge + wide),
                    i * pool_vertical - pool_top,
                    left_edge,
                    high,
                    wide,
                    w_out,
                    k,
                    y_flat,
                    argmax_flat,
                    ((n * h_pool + i) * w_pool + j) * k,
                )


@inlined
def _pool_pixel(ring, first, last, begin, end, top, left, high, wide, w_out, k, y, argmax, place):  # type: ignore[no-untyped-def]
    """Largest of a window (rows first to last, columns begin to end) in every channel."""
    for q in range(k):
        y[place + q] = 0
        argmax[place + q] = NO_GRADIENT
    for i in range(first, last):
        for j in range(begin, end):
            position = np.uint8((i - top) * wide + j - left)
            source = ((i % high) * w_out + j) * k
            for q in range(k):
                value, best = ring[source + q], y[place + q]
                # A NaN wins and stays: it must reach the loss to be noticed.
                better = value > best or value != value
                y[place + q] = value if better else best
                argmax[place + q] = position if better else argmax[place + q]


@inlined
def _unpool(dy, argmax, start, h_pool, w_pool, k, pool_geometry, target, columns, top, left):  # type: ignore[no-untyped-def]
    """Add dy of one sample to the elements of `target` (…, columns, K) that were the maxima."""
    for i in range(h_pool):
        for j in range(w_pool):
            row = i * pool_geometry[2] - pool_geometry[0] + top
            column = j * pool_geometry[3] - pool_geometry[1] + left
            place = start + (i * w_pool + j) * k
            for q in range(k):
                position = np.int64(argmax[place + q])
                if position != NO_GRADIENT:
                    down, across = position // pool_geometry[5], position % pool_geometry[5]
                    target[((row + down) * columns + column + across) * k + q] += dy[place + q]


@inlined
def _add_weight_gradient(
    x, x_start, columns, dz, dz_start, h_out, w_out, geometry, r, s, c, k, partial, tables
):  # type: ignore[no-untyped-def]
    """Add one sample's dw and db to partial."""
    size = r * s * c
    multiply(
        x,
        x_start,
        tables,
        0,
        1,
        geometry[3] * c,
        w_out,
        geometry[2] * columns * c,
        h_out,
        dz,
        dz_start,
        k,
        w_out * k,
        partial,
        0,
        1,
        partial,
        0,
        tables,
        size,
        1,
        size,
        k,
        NOTHING,
    )
    for p in range(h_out * w_out):
        for q in range(k):
            partial[size * k + q] += dz[dz_start + p * k + q]


@inlined
def _filter_tables(r, s, c, columns, k, tables):  # type: ignore[no-untyped-def]
    """Where filter element (r, s, c) starts in a padded sample, and in dw."""
    for i in range(r):
        for j in range(s * c):
            tables[i * s * c + j] = i * columns * c + j
    for i in range(r * s * c):
        tables[r * s * c + i] = i * k


@kernel
def conv2d_backward_weight(start, stop, thread, x, dy, partial, geometry, scratch):  # type: ignore[no-untyped-def]
    """dw[r, s, c, k] = Σ x[n, i·stride + r − top, …, c] · dy[n, i, j, k]; db[k] = Σ dy[n, i, j, k].

    Args:
        x: (N, H, W, C).
        dy: (N, Ho, Wo, K).
        partial: (threads, R·S·C·K + K); row `thread` becomes dw and then db of these samples.
    """
    top, left, vertical, horizontal = geometry[0], geometry[1], geometry[2], geometry[3]
    r, s = geometry[4], geometry[5]
    _, h_in, w_in, c = x.shape
    _, h_out, w_out, k = dy.shape
    rows, columns = (h_out - 1) * vertical + r, (w_out - 1) * horizontal + s
    size = rows * columns * c
    mine, sums = scratch[thread], partial[thread]
    padded, tables = mine[:size], mine[size : size + 2 * r * s * c].view(np.int32)
    x_flat, dy_flat = x.reshape(-1), dy.reshape(-1)
    pads = top > 0 or left > 0 or rows > h_in or columns > w_in
    if not pads:
        columns = w_in
    _filter_tables(r, s, c, columns, k, tables)
    sums[:] = 0
    if pads:
        padded[:] = 0
    for n in range(start, stop):
        a, a_start = x_flat, n * h_in * w_in * c
        if pads:
            _copy_padded(x_flat, a_start, h_in, w_in, c, padded, rows, columns, top, left)
            a, a_start = padded, 0
        _add_weight_gradient(
            a,
            a_start,
            columns,
            dy_flat,
            n * h_out * w_out * k,
            h_out,
            w_out,
            geometry,
            r,
            s,
            c,
            k,
            sums,
            tables,
        )


@kernel
def conv2d_relu_pool_backward_weight(
    start, stop, thread, x, dy, argmax, partial, geometry, pool_geometry, scratch
):  # type: ignore[no-untyped-def]
    """As `conv2d_backward_weight`, with dy and argmax of `conv2d_relu_pool_forward`'s output."""
    top, left, vertical, horizontal = geometry[0], geometry[1], geometry[2], geometry[3]
    r, s = geometry[4], geometry[5]
    _, h_in, w_in, c = x.shape
    _, h_pool, w_pool, k = dy.shape
    h_out, w_out = pool_geometry[6], pool_geometry[7]
    rows, columns = (h_out - 1) * vertical + r, (w_out - 1) * horizontal + s
    size, elements = rows * columns * c, h_out * w_out * k
    mine, sums = scratch[thread], partial[thread]
    padded, tables = mine[:size], mine[size : size + 2 * r * s * c].view(np.int32)
    dz = mine[size + 2 * r * s * c : size + 2 * r * s * c + elements]
    x_flat, dy_flat, argmax_flat = x.reshape(-1), dy.reshape(-1), argmax.reshape(-1)
    pads = top > 0 or left > 0 or rows > h_in or columns > w_in
    if not pads:
        columns = w_in
    _filter_tables(r, s, c, columns, k, tables)
    sums[:] = 0
    if pads:
        padded[:] = 0
    for n in range(start, stop):
        a, a_start = x_flat, n * h_in * w_in * c
        if pads:
            _copy_padded(x_flat, a_start, h_in, w_in, c, padded, rows, columns, top, left)
            a, a_start = padded, 0
        dz[:] = 0
        _unpool(
            dy_flat,
            argmax_flat,
            n * h_pool * w_pool * k,
            h_pool,
            w_pool,
            k,
            pool_geometry,
            dz,
            w_out,
            0,
            0,
        )
        _add_weight_gradient(
            a, a_start, columns, dz, 0, h_out, w_out, geometry, r, s, c, k, sums, tables
        )


@kernel
def reduce_partials(start, stop, thread, partial, dw, db):  # type: ignore[no-untyped-def]
    """dw and db as the sums of every thread's row of `partial`, over elements start to stop."""
    size = len(dw)
    for i in range(start, stop):
        total = partial[0, i]
        for t in range(1, len(partial)):
            total += partial[t, i]
        if i < size:
            dw[i] = total
        else:
            db[i - size] = total


@inlined
def _pack_flipped(w, r, s, c, k, vertical, horizontal, packed):  # type: ignore[no-untyped-def]
    """Weights as backward by the input meets them: by phase, flipped, (…, K, C)."""
    place = 0
    for f in range(vertical):
        for g in range(horizontal):
            taps_v = (r - f + vertical - 1) // vertical if f < r else 0
            taps_h = (s - g + horizontal - 1) // horizontal if g < s else 0
            for i in range(taps_v - 1, -1, -1):
                for j in range(taps_h - 1, -1, -1):
                    source = ((f + i * vertical) * s + g + j * horizontal) * c * k
                    for q in range(k):
                        for p in range(c):
                            packed[place + q * c + p] = w[source + p * k + q]
                    place += c * k


@inlined
def _phase_tables(h_in, w_in, c, k, columns, r, s, geometry, reach_v, reach_h, a_rows, c_rows):  # type: ignore[no-untyped-def]
    """Pixels of the input by phase: where each starts in padded dy and in dx.

    Row h of the input meets the filter rows r ≡ f = (h + top) mod stride alone, so each phase
    (f, g) is a correlation of its own, of stride 1.
    """
    place = 0
    for f in range(geometry[2]):
        taps_v = (r - f + geometry[2] - 1) // geometry[2] if f < r else 0
        for g in range(geometry[3]):
            taps_h = (s - g + geometry[3] - 1) // geometry[3] if g < s else 0
            for h in range((f - geometry[0]) % geometry[2], h_in, geometry[2]):
                row = (h + geometry[0] - f) // geometry[2] - taps_v + 1 + reach_v
                for v in range((g - geometry[1]) % geometry[3], w_in, geometry[3]):
                    column = (v + geometry[1] - g) // geometry[3] - taps_h + 1 + reach_h
                    a_rows[place] = (row * columns + column) * k
                    c_rows[place] = (h * w_in + v) * c
                    place += 1


@inlined
def _correlate_phases(
    dz, columns, r, s, c, k, geometry, packed, a_rows, c_rows, dx, dx_start, h_in, w_in
):  # type: ignore[no-untyped-def]
    """dx of one sample from its padded dz."""
    pixel, weight = 0, 0
    for f in range(geometry[2]):
        taps_v = (r - f + geometry[2] - 1) // geometry[2] if f < r else 0
        high = len(range((f - geometry[0]) % geometry[2], h_in, geometry[2]))
        for g in range(geometry[3]):
            taps_h = (s - g + geometry[3] - 1) // geometry[3] if g < s else 0
            wide = len(range((g - geometry[1]) % geometry[3], w_in, geometry[3]))
            multiply(
                dz,
                0,
                a_rows,
                pixel,
                1,
                1,
                taps_h * k,
                columns * k,
                taps_v,
                packed,
                weight,
                c,
                taps_h * k * c,
                packed,
                0,
                -1,
                dx,
                dx_start,
                c_rows,
                pixel,
                1,
                high * wide,
                c,
                NOTHING,
            )
            pixel += high * wide
            weight += taps_v * taps_h * k * c


@kernel
def conv2d_backward_input(start, stop, thread, dy, w, dx, geometry, scratch):  # type: ignore[no-untyped-def]
    """dx[n, h, v, c] = Σ dy[n, i, j, k] · w[r, s, c, k] over i·stride + r − top = h, and so on.

    Args:
        dy: (N, Ho, Wo, K).
        w: (R, S, C, K).
        dx: (N, H, W, C), written.
    """
    top, left, vertical, horizontal = geometry[0], geometry[1], geometry[2], geometry[3]
    _, h_in, w_in, c = dx.shape
    r, s, _, k = w.shape
    _, h_out, w_out, _ = dy.shape
    reach_v, reach_h = (r - 1) // vertical, (s - 1) // horizontal
    rows = (h_in - 1 + top) // vertical + 1 + reach_v
    columns = (w_in - 1 + left) // horizontal + 1 + reach_h
    size, weights, pixels = rows * columns * k, r * s * c * k, h_in * w_in
    mine = scratch[thread]
    dz, packed = mine[:size], mine[size : size + weights]
    tables = mine[size + weights : size + weights + 2 * pixels].view(np.int32)
    a_rows, c_rows = tables[:pixels], tables[pixels:]
    dy_flat, w_flat, dx_flat = dy.reshape(-1), w.reshape(-1), dx.reshape(-1)
    if start < stop:
        _pack_flipped(w_flat, r, s, c, k, vertical, horizontal, packed)
        _phase_tables(h_in, w_in, c, k, columns, r, s, geometry, reach_v, reach_h, a_rows, c_rows)
    dz[:] = 0
    for n in range(start, stop):
        _copy_padded(
            dy_flat, n * h_out * w_out * k, h_out, w_out, k, dz, rows, columns, reach_v, reach_h
        )
        _correlate_phases(
            dz,
            columns,
            r,
            s,
            c,
            k,
            geometry,
            packed,
            a_rows,
            c_rows,
            dx_flat,
            n * pixels * c,
            h_in,
            w_in,
        )


@kernel
def conv2d_relu_pool_backward_input(
    start, stop, thread, dy, argmax, w, dx, geometry, pool_geometry, scratch
):  # type: ignore[no-untyped-def]
    """As `conv2d_backward_input`, with dy and argmax of `conv2d_relu_pool_forward`'s output."""
    top, left, vertical, horizontal = geometry[0], geometry[1], geometry[2], geometry[3]
    _, h_in, w_in, c = dx.shape
    r, s, _, k = w.shape
    _, h_pool, w_pool, _ = dy.shape
    h_out, w_out = pool_geometry[6], pool_geometry[7]
    reach_v, reach_h = (r - 1) // vertical, (s - 1) // horizontal
    rows = max((h_in - 1 + top) // vertical + 1, h_out) + reach_v
    columns = max((w_in - 1 + left) // horizontal + 1, w_out) + reach_h
    size, weights, pixels = rows * columns * k, r * s * c * k, h_in * w_in
    mine = scratch[thread]
    dz, packed = mine[:size], mine[size : size + weights]
    tables = mine[size + weights : size + weights + 2 * pixels].view(np.int32)
    a_rows, c_rows = tables[:pixels], tables[pixels:]
    dy_flat, w_flat, dx_flat = dy.reshape(-1), w.reshape(-1), dx.reshape(-1)
    argmax_flat = argmax.reshape(-1)
    if start < stop:
        _pack_flipped(w_flat, r, s, c, k, vertical, horizontal, packed)
        _phase_tables(h_in, w_in, c, k, columns, r, s, geometry, reach_v, reach_h, a_rows, c_rows)
    for n in range(start, stop):
        dz[:] = 0
        _unpool(
            dy_flat,
            argmax_flat,
            n * h_pool * w_pool * k,
            h_pool,
            w_pool,
            k,
            pool_geometry,
            dz,
            columns,
            reach_v,
            reach_h,
        )
        _correlate_phases(
            dz,
            columns,
            r,
            s,
            c,
            k,
            geometry,
            packed,
            a_rows,
            c_rows,
            dx_flat,
            n * pixels * c,
            h_in,
            w_in,
        )
