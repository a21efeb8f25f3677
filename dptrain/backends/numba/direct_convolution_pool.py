"""Direct convolution fused with ReLU and max pooling, forward and backward.

Neither the convolution's output nor its gradient is stored as a whole. Forward stores the pooled
maps and the position of each maximum, `NO_GRADIENT` if it is not positive. Arguments are those of
`direct_convolution`, and `pool` from `pool_geometry`.
"""

from __future__ import annotations

import numpy as np

from dptrain.backends.numba.im2col import (
    add_weight_gradient,
    band_rows,
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
    pool_row,
    unpool,
)
from dptrain.backends.numba.jit import kernel
from dptrain.backends.numba.microkernels import multiply_spaced
from dptrain.backends.numba.pooled_microkernels import fewest_windows, multiply_pooled
from dptrain.backends.numba.vector import vector_width


@kernel
def conv2d_relu_pool_forward(start, stop, thread, x, w, b, y, argmax, geometry, pool, scratch):  # type: ignore[no-untyped-def]
    """Compute convolution, ReLU and max pooling without storing the convolution's output.

    Args:
        x, w, b: as in `conv2d_forward`.
        y: (N, Hp, Wp, K) pooled maps, written.
        argmax: uint8 like y, written: the position of each maximum in its window, counted row by
            row, the first among equals; `NO_GRADIENT` if the maximum is not positive.
    """
    _, h_in, w_in, c = x.shape
    r, s, _, k = w.shape
    _, h_pool, w_pool, _ = y.shape
    top, left, down, across = (
        geometry.pad_top,
        geometry.pad_left,
        geometry.stride_v,
        geometry.stride_h,
    )
    high, h_out, w_out = pool.window_v, pool.height, pool.width
    rows, columns = padded_maps(h_out, w_out, geometry)
    pixels, size, patch = h_out * w_out, rows * columns * c, r * s * c
    mine = scratch[thread]
    padded, tables = mine[:size], mine[size : size + 2 * pixels + patch].view(np.int32)
    a_rows, c_rows, a_steps = tables[:pixels], tables[pixels : 2 * pixels], tables[2 * pixels :]
    band = mine[size + 2 * pixels + patch :]
    x_flat, w_flat, y_flat, argmax_flat = (
        x.reshape(-1),
        w.reshape(-1),
        y.reshape(-1),
        argmax.reshape(-1),
    )
    inside = is_inside(geometry, h_in, w_in, rows, columns)
    width = w_in if inside else columns
    fill_pixels(h_out, w_out, down * width * c, across * c, a_rows)
    fill_ramp(k, c_rows)
    fill_filter(r, s * c, width * c, a_steps)
    if not inside:
        padded[:] = 0
    # Adjacent complete 2 × 2 windows are pooled in registers.
    direct = pool.pad_top == 0 and pool.pad_left == 0 and pool.stride_v == 2 and pool.stride_h == 2
    direct = direct and high == 2 and pool.window_h == 2
    direct = direct and 2 * h_pool <= h_out and 2 * w_pool <= w_out
    direct = direct and w_pool >= fewest_windows() and k % vector_width() == 0
    for n in range(start, stop):
        a, a_start = x_flat, n * h_in * w_in * c
        if not inside:
            copy_padded(x_flat, a_start, (h_in, w_in, c), padded, rows, columns, top, left)
            a, a_start = padded, 0
        if direct:
            for i in range(h_pool):
                multiply_pooled(
                    (a, a_start + 2 * i * down * width * c),
                    (down * width * c, across * c),
                    (a_steps, 0, 1),
                    (w_flat, 0, k),
                    (b, 0),
                    (y_flat, (n * h_pool + i) * w_pool * k),
                    (argmax_flat, (n * h_pool + i) * w_pool * k),
                    (patch, w_pool),
                )
            continue
        ready = 0
        for i in range(h_pool):
            # `band` holds the rows that this row of windows needs, from row `above` on.
            above = i * pool.stride_v - pool.pad_top
            last = min(h_out, above + high)
            first = max(0, above)
            if first < ready:
                shift = pool.stride_v * w_out * k
                for p in range((first - above) * w_out * k, (ready - above) * w_out * k):
                    band[p] = band[p + shift]
            ready = max(ready, first)
            multiply_spaced(
                (a, a_start),
                (a_rows, ready * w_out, 1),
                (a_steps, 0, 1),
                (w_flat, 0, k),
                (b, 0, 0),
                (band, (ready - above) * w_out * k),
                (c_rows, 0, 1),
                (max(0, last - ready) * w_out, patch, k),
                np.float32(0),
                w_out,
            )
            ready = max(ready, last)
            pool_row(
                band,
                0,
                first - above,
                last - above,
                w_out,
                w_out,
                w_pool,
                k,
                pool,
                y_flat,
                argmax_flat,
                (n * h_pool + i) * w_pool * k,
            )


@kernel
def conv2d_relu_pool_backward_weight(  # type: ignore[no-untyped-def]
    start, stop, thread, x, dy, argmax, partial, geometry, pool, scratch
):
    """As `conv2d_backward_weight`, with dy and argmax of `conv2d_relu_pool_forward`'s output."""
    _, h_in, w_in, c = x.shape
    _, h_pool, w_pool, k = dy.shape
    top, left, down, across, r, s = geometry
    high, h_out, w_out = pool.window_v, pool.height, pool.width
    rows, columns = padded_maps(h_out, w_out, geometry)
    pixels, size, patch = h_out * w_out, rows * columns * c, r * s * c
    mine, sums = scratch[thread], partial[thread]
    padded, tables = mine[:size], mine[size : size + 2 * patch + pixels].view(np.int32)
    dz = mine[size + 2 * patch + pixels :][: pixels * k]
    x_flat, dy_flat, argmax_flat = x.reshape(-1), dy.reshape(-1), argmax.reshape(-1)
    inside = is_inside(geometry, h_in, w_in, rows, columns)
    width = w_in if inside else columns
    fill_filter(r, s * c, width * c, tables[:patch])
    fill_ramp(k, tables[patch : 2 * patch])
    fill_pixels(h_out, w_out, down * width * c, across * c, tables[2 * patch :])
    # If windows do not overlap, few rows are unpooled at a time, so that dz stays in the L1 cache.
    step = h_pool
    if pool.stride_v == high and pool.pad_top == 0 and h_pool * high <= h_out:
        step = max(1, band_rows(w_out, c, k) // high)
    sums[:] = 0
    dz[:] = 0
    if not inside:
        padded[:] = 0
    for n in range(start, stop):
        a, a_start = x_flat, n * h_in * w_in * c
        if not inside:
            copy_padded(x_flat, a_start, (h_in, w_in, c), padded, rows, columns, top, left)
            a, a_start = padded, 0
        for i in range(0, h_pool, step):
            count = min(step, h_pool - i)
            unpool(
                dy_flat,
                argmax_flat,
                (n * h_pool + i) * w_pool * k,
                count,
                w_pool,
                k,
                pool,
                dz,
                w_out,
                0,
                0,
                sums[patch * k :],
            )
            first = i * pool.window_v * w_out if step < h_pool else 0
            height = count * pool.window_v if step < h_pool else h_out
            add_weight_gradient(a, a_start, dz, 0, tables, first, height, w_out, r, s, c, k, sums)


@kernel
def conv2d_relu_pool_backward_input(  # type: ignore[no-untyped-def]
    start, stop, thread, dy, argmax, w, dx, geometry, pool, scratch
):
    """As `conv2d_backward_input`, with dy and argmax of `conv2d_relu_pool_forward`'s output."""
    _, h_in, w_in, c = dx.shape
    r, s, _, k = w.shape
    _, h_pool, w_pool, _ = dy.shape
    h_out, w_out = pool.height, pool.width
    down, across = geometry.stride_v, geometry.stride_h
    above, before = (r - 1) // down, (s - 1) // across
    rows, columns = padded_gradient(h_in, w_in, h_out, w_out, geometry)
    size, weights, pixels = rows * columns * k, r * s * c * k, h_in * w_in
    mine = scratch[thread]
    dz, packed = mine[:size], mine[size : size + weights]
    tables = mine[size + weights : size + weights + 2 * pixels + r * s * k].view(np.int32)
    sums = mine[size + weights + 2 * pixels + r * s * k :][:k]
    a_rows, c_rows, a_steps = tables[:pixels], tables[pixels : 2 * pixels], tables[2 * pixels :]
    dy_flat, dx_flat, argmax_flat = dy.reshape(-1), dx.reshape(-1), argmax.reshape(-1)
    pack_flipped(w.reshape(-1), w.shape, geometry, packed)
    fill_phases(h_in, w_in, c, k, columns, geometry, a_rows, c_rows, a_steps)
    dz[:] = 0
    sums[:] = 0
    for n in range(start, stop):
        unpool(
            dy_flat,
            argmax_flat,
            n * h_pool * w_pool * k,
            h_pool,
            w_pool,
            k,
            pool,
            dz,
            columns,
            above,
            before,
            sums,
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
