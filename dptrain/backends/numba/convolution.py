"""Convolution, forward and backward, as loops over register tiles.

Layouts: activations (N, H, W, C), weights (R, S, C, K), all float32 and contiguous. Nothing is
unrolled into a matrix: tables of offsets (`patches`) let `multiply` find its operands in the maps,
of which each sample is copied into scratch, zeros around it, where it has padding.

Every kernel takes ``(start, stop, thread)`` first: a range of samples and the number of the thread
that computes it. `scratch` has one row of float32 for each thread, at least as long as
`conv_scratch` says; `geometry` comes from `conv_geometry`, `pool` from `pool_geometry`.
"""

from __future__ import annotations

import numpy as np

from dptrain.backends.numba.jit import expanded, inlined, kernel
from dptrain.backends.numba.microkernels import multiply
from dptrain.backends.numba.patches import (
    conv_geometry,
    conv_scratch,
    copy_padded,
    fill_filter,
    fill_pixels,
    fill_ramp,
    is_inside,
    pool_geometry,
    taps,
    unpool,
)
from dptrain.backends.numba.vector import transpose
from dptrain.backends.numba.windows import NO_GRADIENT, maximum_of_windows

__all__ = [
    "NO_GRADIENT",
    "conv2d_backward_input",
    "conv2d_backward_weight",
    "conv2d_forward",
    "conv2d_relu_pool_backward_input",
    "conv2d_relu_pool_backward_weight",
    "conv2d_relu_pool_forward",
    "conv_geometry",
    "conv_scratch",
    "pool_geometry",
    "reduce_partials",
]

NOTHING = np.float32(-np.inf)
"""The floor that changes nothing."""

BAND = 8192
"""Elements of x and dy that backward by the weights takes at a time: together they fit in L1."""


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
    _, h_in, w_in, c = x.shape
    r, s, _, k = w.shape
    _, h_out, w_out, _ = y.shape
    top, left, down, across = geometry[0], geometry[1], geometry[2], geometry[3]
    rows, columns = (h_out - 1) * down + r, (w_out - 1) * across + s
    pixels, size, patch = h_out * w_out, rows * columns * c, r * s * c
    mine = scratch[thread]
    padded, tables = mine[:size], mine[size : size + 2 * pixels + patch].view(np.int32)
    a_rows, c_rows, a_steps = tables[:pixels], tables[pixels : 2 * pixels], tables[2 * pixels :]
    x_flat, w_flat, y_flat = x.reshape(-1), w.reshape(-1), y.reshape(-1)
    inside = is_inside(geometry, h_in, w_in, rows, columns)
    width = w_in if inside else columns
    fill_pixels(h_out, w_out, down * width * c, across * c, a_rows)
    fill_ramp(k, c_rows)
    fill_filter(r, s * c, width * c, a_steps)
    if not inside:
        padded[:] = 0
    floor = np.float32(0) if relu else NOTHING
    for n in range(start, stop):
        a, a_start = x_flat, n * h_in * w_in * c
        if not inside:
            copy_padded(x_flat, a_start, (h_in, w_in, c), padded, rows, columns, top, left)
            a, a_start = padded, 0
        multiply(
            (a, a_start), (a_rows, 0, 1), (a_steps, 0, 1), (w_flat, 0, k),
            (b, 0, 0), (y_flat, n * pixels * k), (c_rows, 0, 1), (pixels, patch, k), floor,
        )


@kernel
def conv2d_relu_pool_forward(start, stop, thread, x, w, b, y, argmax, geometry, pool, scratch):  # type: ignore[no-untyped-def]
    """Convolution, ReLU and max pooling in one; the convolution's own output is never stored.

    Args:
        x, w, b: as in `conv2d_forward`.
        y: (N, Hp, Wp, K) the pooled maps, written.
        argmax: uint8 like y, written: which element of its window each maximum is, counted along
            the window's rows, the first among equals; `NO_GRADIENT` where it is not above 0.
    """
    _, h_in, w_in, c = x.shape
    r, s, _, k = w.shape
    _, h_pool, w_pool, _ = y.shape
    top, left, down, across = geometry[0], geometry[1], geometry[2], geometry[3]
    high, h_out, w_out = pool[4], pool[6], pool[7]
    rows, columns = (h_out - 1) * down + r, (w_out - 1) * across + s
    pixels, size, patch = h_out * w_out, rows * columns * c, r * s * c
    mine = scratch[thread]
    padded, tables = mine[:size], mine[size : size + 2 * pixels + patch].view(np.int32)
    a_rows, c_rows, a_steps = tables[:pixels], tables[pixels : 2 * pixels], tables[2 * pixels :]
    band = mine[size + 2 * pixels + patch :]
    x_flat, w_flat, y_flat, argmax_flat = (
        x.reshape(-1), w.reshape(-1), y.reshape(-1), argmax.reshape(-1),
    )
    inside = is_inside(geometry, h_in, w_in, rows, columns)
    width = w_in if inside else columns
    fill_pixels(h_out, w_out, down * width * c, across * c, a_rows)
    fill_ramp(k, c_rows)
    fill_filter(r, s * c, width * c, a_steps)
    if not inside:
        padded[:] = 0
    for n in range(start, stop):
        a, a_start = x_flat, n * h_in * w_in * c
        if not inside:
            copy_padded(x_flat, a_start, (h_in, w_in, c), padded, rows, columns, top, left)
            a, a_start = padded, 0
        ready = 0
        for i in range(h_pool):
            # `band` holds the rows that this row of windows meets, from row `above` on.
            above = i * pool[2] - pool[0]
            last = min(h_out, above + high)
            first = max(0, above)
            if first < ready:
                shift = pool[2] * w_out * k
                for p in range((first - above) * w_out * k, (ready - above) * w_out * k):
                    band[p] = band[p + shift]
            ready = max(ready, first)
            multiply(
                (a, a_start), (a_rows, ready * w_out, 1), (a_steps, 0, 1), (w_flat, 0, k),
                (b, 0, 0), (band, (ready - above) * w_out * k), (c_rows, 0, 1),
                (max(0, last - ready) * w_out, patch, k), np.float32(0),
            )
            ready = max(ready, last)
            pool_row(
                band, first - above, last - above, w_out, w_pool, k, pool,
                y_flat, argmax_flat, (n * h_pool + i) * w_pool * k,
            )


@expanded
def pool_row(band, first, last, w_out, w_pool, k, pool, y, argmax, start):  # type: ignore[no-untyped-def]
    """Maxima of one row of windows, whose rows `first` to `last` exist, from `band`."""
    wide = pool[5]
    j = 0
    while j < w_pool:
        column = j * pool[3] - pool[1]
        begin, end, count = max(0, -column), min(wide, w_out - column), 1
        if begin == 0 and end == wide:
            # All windows up to the last whole one.
            count = max(1, min(w_pool, (w_out - wide + pool[1]) // pool[3] + 1) - j)
        maximum_of_windows(
            *(band, column * k, y, start + j * k, argmax, start + j * k),
            *(first, last, begin, end, wide, w_out * k, pool[3], k, count),
        )
        j += count


@expanded
def add_weight_gradient(a, a_start, dz, dz_start, tables, h_out, w_out, window, patch, k, sums):  # type: ignore[no-untyped-def]
    """Add one sample's dw to sums (R·S·C, K).

    Args:
        tables: filter table, table of dw's rows and pixel table, one behind the other.
        window: R · S.
        patch: R · S · C.
    """
    step = max(1, max(96, BAND // (patch // window + k)) // w_out) * w_out
    for p in range(0, h_out * w_out, step):
        multiply(
            (a, a_start), (tables, 0, 1), (tables, 2 * patch + p, 1), (dz, dz_start + p * k, k),
            (sums, 0, 1), (sums, 0), (tables, patch, 1),
            (patch, min(step, h_out * w_out - p), k), NOTHING,
        )


@kernel
def conv2d_backward_weight(start, stop, thread, x, dy, partial, geometry, scratch):  # type: ignore[no-untyped-def]
    """dw[r, s, c, k] = Σ x[n, i·stride + r − top, …, c] · dy[n, i, j, k]; db[k] = Σ dy[n, i, j, k].

    Args:
        x: (N, H, W, C).
        dy: (N, Ho, Wo, K).
        partial: (threads, R·S·C·K + K); row `thread` becomes dw and then db of these samples.
    """
    _, h_in, w_in, c = x.shape
    _, h_out, w_out, k = dy.shape
    top, left, down, across, r, s = geometry
    rows, columns = (h_out - 1) * down + r, (w_out - 1) * across + s
    pixels, size, patch = h_out * w_out, rows * columns * c, r * s * c
    mine, sums = scratch[thread], partial[thread]
    padded, tables = mine[:size], mine[size : size + 2 * patch + pixels].view(np.int32)
    one = mine[size + 2 * patch + pixels :]
    x_flat, dy_flat = x.reshape(-1), dy.reshape(-1)
    inside = is_inside(geometry, h_in, w_in, rows, columns)
    width = w_in if inside else columns
    fill_filter(r, s * c, width * c, tables[:patch])
    fill_ramp(k, tables[patch : 2 * patch])
    fill_pixels(h_out, w_out, down * width * c, across * c, tables[2 * patch :])
    sums[:] = 0
    one[0] = 1
    if not inside:
        padded[:] = 0
    for n in range(start, stop):
        a, a_start = x_flat, n * h_in * w_in * c
        if not inside:
            copy_padded(x_flat, a_start, (h_in, w_in, c), padded, rows, columns, top, left)
            a, a_start = padded, 0
        dz_start = n * pixels * k
        add_weight_gradient(
            a, a_start, dy_flat, dz_start, tables, h_out, w_out, r * s, patch, k, sums
        )
        # db is the product of dy with ones.
        multiply(
            (one, 0), (tables, 0, 0), (tables, 0, 0), (dy_flat, dz_start, k),
            (sums, patch * k, 0), (sums, patch * k), (tables, patch, 1), (1, pixels, k), NOTHING,
        )


@kernel
def conv2d_relu_pool_backward_weight(start, stop, thread, x, dy, argmax, partial, geometry, pool, scratch):  # type: ignore[no-untyped-def]  # noqa: E501
    """As `conv2d_backward_weight`, with dy and argmax of `conv2d_relu_pool_forward`'s output."""
    _, h_in, w_in, c = x.shape
    _, h_pool, w_pool, k = dy.shape
    top, left, down, across, r, s = geometry
    h_out, w_out = pool[6], pool[7]
    rows, columns = (h_out - 1) * down + r, (w_out - 1) * across + s
    pixels, size, patch = h_out * w_out, rows * columns * c, r * s * c
    mine, sums = scratch[thread], partial[thread]
    padded, tables = mine[:size], mine[size : size + 2 * patch + pixels].view(np.int32)
    dz = mine[size + 2 * patch + pixels :]
    x_flat, dy_flat, argmax_flat = x.reshape(-1), dy.reshape(-1), argmax.reshape(-1)
    inside = is_inside(geometry, h_in, w_in, rows, columns)
    width = w_in if inside else columns
    fill_filter(r, s * c, width * c, tables[:patch])
    fill_ramp(k, tables[patch : 2 * patch])
    fill_pixels(h_out, w_out, down * width * c, across * c, tables[2 * patch :])
    sums[:] = 0
    dz[:] = 0
    if not inside:
        padded[:] = 0
    for n in range(start, stop):
        a, a_start = x_flat, n * h_in * w_in * c
        if not inside:
            copy_padded(x_flat, a_start, (h_in, w_in, c), padded, rows, columns, top, left)
            a, a_start = padded, 0
        pooled = n * h_pool * w_pool * k
        unpool(
            dy_flat, argmax_flat, pooled, h_pool, w_pool, k, pool, dz, w_out, 0, 0,
            sums[patch * k :],
        )
        add_weight_gradient(a, a_start, dz, 0, tables, h_out, w_out, r * s, patch, k, sums)


@kernel
def reduce_partials(start, stop, thread, partial, dw, db):  # type: ignore[no-untyped-def]
    """Dw and db as the sums of every thread's row of `partial`, over elements start to stop."""
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
def pack_flipped(w, shape, geometry, packed):  # type: ignore[no-untyped-def]
    """Weights as backward by the input meets them: by phase, flipped, (…, K, C)."""
    r, s, c, k = shape
    down, across = geometry[2], geometry[3]
    place = 0
    for f in range(down):
        for g in range(across):
            for i in range(taps(r, f, down) - 1, -1, -1):
                for j in range(taps(s, g, across) - 1, -1, -1):
                    source = ((f + i * down) * s + g + j * across) * c * k
                    transpose(w, source, k, packed, place, c, c, k)
                    place += c * k


@inlined
def fill_phases(h_in, w_in, c, k, columns, geometry, a_rows, c_rows, a_steps):  # type: ignore[no-untyped-def]
    """Pixels of the input by phase, where each starts in padded dz and in dx; and filter tables.

    Row h of the input meets only the filter rows f, f + stride, … with f = (h + top) mod stride.
    So each phase (f, g) is a correlation of stride 1 of its own.
    """
    top, left, down, across, r, s = geometry
    pixel, step = 0, 0
    for f in range(down):
        for g in range(across):
            # Padded dz has (r − 1) // down rows above: as many as the phase with most taps needs.
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
def correlate_phases(dz, h_in, w_in, c, k, geometry, packed, a_rows, c_rows, a_steps, dx, dx_start):  # type: ignore[no-untyped-def]
    """Dx of one sample from its padded dz."""
    top, left, down, across, r, s = geometry
    pixel, step = 0, 0
    for f in range(down):
        for g in range(across):
            pixels = taps(h_in, (f - top) % down, down) * taps(w_in, (g - left) % across, across)
            size = taps(r, f, down) * taps(s, g, across) * k
            multiply(
                (dz, 0), (a_rows, pixel, 1), (a_steps, step, 1), (packed, step * c, c),
                (packed, 0, -1), (dx, dx_start), (c_rows, pixel, 1), (pixels, size, c), NOTHING,
            )
            pixel += pixels
            step += size


@kernel
def conv2d_backward_input(start, stop, thread, dy, w, dx, geometry, scratch):  # type: ignore[no-untyped-def]
    """dx[n, h, v, c] = Σ dy[n, i, j, k] · w[r, s, c, k] over i·stride + r − top = h, and so on.

    Args:
        dy: (N, Ho, Wo, K).
        w: (R, S, C, K).
        dx: (N, H, W, C), written.
    """
    _, h_in, w_in, c = dx.shape
    r, s, _, k = w.shape
    _, h_out, w_out, _ = dy.shape
    top, left, down, across = geometry[0], geometry[1], geometry[2], geometry[3]
    above, before = (r - 1) // down, (s - 1) // across
    rows = (h_in - 1 + top) // down + 1 + above
    columns = (w_in - 1 + left) // across + 1 + before
    size, weights, pixels = rows * columns * k, r * s * c * k, h_in * w_in
    mine = scratch[thread]
    dz, packed = mine[:size], mine[size : size + weights]
    tables = mine[size + weights : size + weights + 2 * pixels + r * s * k].view(np.int32)
    a_rows, c_rows, a_steps = tables[:pixels], tables[pixels : 2 * pixels], tables[2 * pixels :]
    dy_flat, dx_flat = dy.reshape(-1), dx.reshape(-1)
    pack_flipped(w.reshape(-1), w.shape, geometry, packed)
    fill_phases(h_in, w_in, c, k, columns, geometry, a_rows, c_rows, a_steps)
    dz[:] = 0
    for n in range(start, stop):
        copy_padded(
            dy_flat, n * h_out * w_out * k, (h_out, w_out, k), dz, rows, columns, above, before
        )
        correlate_phases(
            dz, h_in, w_in, c, k, geometry, packed, a_rows, c_rows, a_steps,
            dx_flat, n * pixels * c,
        )


@kernel
def conv2d_relu_pool_backward_input(start, stop, thread, dy, argmax, w, dx, geometry, pool, scratch):  # type: ignore[no-untyped-def]  # noqa: E501
    """As `conv2d_backward_input`, with dy and argmax of `conv2d_relu_pool_forward`'s output."""
    _, h_in, w_in, c = dx.shape
    r, s, _, k = w.shape
    _, h_pool, w_pool, _ = dy.shape
    h_out, w_out = pool[6], pool[7]
    top, left, down, across = geometry[0], geometry[1], geometry[2], geometry[3]
    above, before = (r - 1) // down, (s - 1) // across
    rows = max((h_in - 1 + top) // down + 1, h_out) + above
    columns = max((w_in - 1 + left) // across + 1, w_out) + before
    size, weights, pixels = rows * columns * k, r * s * c * k, h_in * w_in
    mine = scratch[thread]
    dz, packed = mine[:size], mine[size : size + weights]
    tables = mine[size + weights : size + weights + 2 * pixels + r * s * k].view(np.int32)
    sums = mine[size + weights + 2 * pixels + r * s * k :]
    a_rows, c_rows, a_steps = tables[:pixels], tables[pixels : 2 * pixels], tables[2 * pixels :]
    dy_flat, dx_flat, argmax_flat = dy.reshape(-1), dx.reshape(-1), argmax.reshape(-1)
    pack_flipped(w.reshape(-1), w.shape, geometry, packed)
    fill_phases(h_in, w_in, c, k, columns, geometry, a_rows, c_rows, a_steps)
    dz[:] = 0
    sums[:] = 0
    for n in range(start, stop):
        unpool(
            dy_flat, argmax_flat, n * h_pool * w_pool * k, h_pool, w_pool, k, pool,
            dz, columns, above, before, sums,
        )
        correlate_phases(
            dz, h_in, w_in, c, k, geometry, packed, a_rows, c_rows, a_steps,
            dx_flat, n * pixels * c,
        )
