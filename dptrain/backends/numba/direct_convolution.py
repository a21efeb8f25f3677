"""Direct convolution: implicit GEMM with register tiles, forward and backward.

Activations are (N, H, W, C), weights (R, S, C, K), all float32 and contiguous. Tables of offsets
(`im2col`) locate the operands of `multiply` in the maps. With padding, each sample is first copied
into zero-padded scratch.

The first arguments of every kernel are ``(start, stop, thread)``: a range of samples and the number
of the computing thread. `scratch` has one row of float32 per thread, with the length from
`conv_scratch`; `geometry` is made by `conv_geometry`.
"""

from __future__ import annotations

import numpy as np

from dptrain.backends.numba.im2col import (
    add_weight_gradient,
    copy_padded,
    correlate_phases,
    fill_filter,
    fill_phases,
    fill_pixels,
    fill_ramp,
    is_inside,
    pack_flipped,
    padded_gradient,
    padded_maps,
    rows_alike,
)
from dptrain.backends.numba.jit import kernel
from dptrain.backends.numba.microkernels import NO_LOWER_BOUND, multiply, multiply_spaced


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
    top, left, down, across = (
        geometry.pad_top,
        geometry.pad_left,
        geometry.stride_v,
        geometry.stride_h,
    )
    rows, columns = padded_maps(h_out, w_out, geometry)
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
    lower_bound = np.float32(0) if relu else NO_LOWER_BOUND
    for n in range(start, stop):
        a, a_start = x_flat, n * h_in * w_in * c
        if not inside:
            copy_padded(x_flat, a_start, (h_in, w_in, c), padded, rows, columns, top, left)
            a, a_start = padded, 0
        i = 0
        while i < h_out:
            above = i * down - top
            first, last, stop_row = rows_alike(i, h_out, down, above, r, h_in)
            multiply_spaced(
                (a, a_start),
                (a_rows, i * w_out, 1),
                (a_steps, first * s * c, 1),
                (w_flat, first * s * c * k, k),
                (b, 0, 0),
                (y_flat, (n * pixels + i * w_out) * k),
                (c_rows, 0, 1),
                ((stop_row - i) * w_out, (last - first) * s * c, k),
                lower_bound,
                w_out,
            )
            i = stop_row


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
    rows, columns = padded_maps(h_out, w_out, geometry)
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
            a, a_start, dy_flat, dz_start, tables, 0, h_out, w_out, r, s, c, k, sums
        )
        # db is the product of ones with dy.
        multiply(
            (one, 0),
            (tables, 0, 0),
            (tables, 0, 0),
            (dy_flat, dz_start, k),
            (sums, patch * k, 0),
            (sums, patch * k),
            (tables, patch, 1),
            (1, pixels, k),
            NO_LOWER_BOUND,
        )


@kernel
def reduce_partials(start, stop, thread, partial, dw, db):  # type: ignore[no-untyped-def]
    """Sum the threads' rows of `partial` into dw and db, for elements start to stop."""
    size = len(dw)
    for i in range(start, stop):
        total = partial[0, i]
        for t in range(1, len(partial)):
            total += partial[t, i]
        if i < size:
            dw[i] = total
        else:
            db[i - size] = total


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
    down, across = geometry.stride_v, geometry.stride_h
    above, before = (r - 1) // down, (s - 1) // across
    rows, columns = padded_gradient(h_in, w_in, h_out, w_out, geometry)
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
            dz,
            h_out,
            h_in,
            w_in,
            c,
            k,
            geometry,
            packed,
            a_rows,
            c_rows,
            a_steps,
            dx_flat,
            n * pixels * c,
        )
