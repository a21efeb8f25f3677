"""Group normalisation and layer normalisation, whose statistics belong to one sample.

Activations are (N, H·W, C), items are samples. Parameter gradients are sums over samples: the
kernels store those of each sample in `partial`, float64 (N, 2·C), which `batch_norm.sum_samples`
adds. `moments` is float32 (N, 2, groups) or, for layer normalisation, (N, 2, H·W): mean and
1 / deviation. `scratch` has `batch_norm.ROWS` rows of C for each thread.
"""

from __future__ import annotations

import math

import numpy as np

from dptrain.backends.numba.normalization.batch_norm import SUMS
from dptrain.backends.numba.normalization.channel_passes import (
    normalise,
    propagate,
    sum_deviations,
    sum_gradients,
)
from dptrain.native.jit import inlined, kernel


@inlined
def _group_moments(sums, shift, c, group, groups, pixels, epsilon):
    """Return mean and 1 / deviation of a group from sums of distances from the channels' shifts."""
    size, mean, square = c // groups, 0.0, 0.0
    for i in range(group * size, group * size + size):
        mean += np.float64(sums[i]) + pixels * np.float64(shift[i])
    mean /= size * pixels
    for i in range(group * size, group * size + size):
        # Distances from the mean of the group, from those from the shift of the channel.
        distance = np.float64(shift[i]) - mean
        first, second = np.float64(sums[i]), np.float64(sums[c + i])
        square += second + distance * (2.0 * first + pixels * distance)
    return mean, 1.0 / math.sqrt(max(0.0, square / (size * pixels)) + epsilon)


@inlined
def _fill_constants(norm, n, mine):
    """Fill the rows mean, factor and bias of scratch from the moments of a sample's groups."""
    moments, weight, c = norm.moments[n], norm.weight, len(norm.weight)
    size = c // moments.shape[1]
    for i in range(c):
        mine[i] = moments[0, i // size]
        mine[c + i] = weight[i] * moments[1, i // size]
        mine[2 * c + i] = norm.bias[i]


@kernel
def group_norm_forward(items, x, y, norm, scratch, epsilon):
    """Store the moments of each group, and y."""
    pixels, c, moments = x.shape[1], x.shape[2], norm.moments
    groups = moments.shape[2]
    flat, result, mine = x.reshape(-1), y.reshape(-1), scratch[items.thread]
    for n in range(items.start, items.stop):
        at = n * pixels * c
        for i in range(c):
            mine[i] = flat[at + i]
        sum_deviations(flat, at, mine, 0, mine, SUMS * c, pixels, c, 0)
        for group in range(groups):
            mean, inverse = _group_moments(
                mine[SUMS * c :], mine, c, group, groups, float(pixels), epsilon
            )
            moments[n, 0, group], moments[n, 1, group] = mean, inverse
        _fill_constants(norm, n, mine)
        normalise(flat, at, flat, at, result, at, mine, 0, mine, 0, pixels, c, 0)


@kernel
def group_norm_sums(items, x, dy, norm, partial, scratch):
    """Store Σ dy · x̂ and Σ dy of each channel of each sample."""
    pixels, c, moments = x.shape[1], x.shape[2], norm.moments
    groups = moments.shape[2]
    flat, dy_flat, mine = x.reshape(-1), dy.reshape(-1), scratch[items.thread]
    for n in range(items.start, items.stop):
        at, row = n * pixels * c, partial[n]
        _fill_constants(norm, n, mine)
        sum_gradients(
            flat, at, dy_flat, at, flat, at, dy_flat, at, mine, 0, mine, SUMS * c, pixels, c, 0
        )
        for i in range(c):
            inverse = np.float64(moments[n, 1, i // (c // groups)])
            row[i] = np.float64(mine[(SUMS + 1) * c + i]) * inverse
            row[c + i] = np.float64(mine[SUMS * c + i])


@kernel
def group_norm_backward(items, x, dy, dx, norm, partial, scratch):
    """dx = (w dy − mean of w dy − x̂ · mean of w dy x̂) / deviation; means are those of a group."""
    pixels, c, moments = x.shape[1], x.shape[2], norm.moments
    groups = moments.shape[2]
    flat, dy_flat, dx_flat, mine = (
        x.reshape(-1),
        dy.reshape(-1),
        dx.reshape(-1),
        scratch[items.thread],
    )
    size, weight = c // groups, norm.weight
    for n in range(items.start, items.stop):
        at = n * pixels * c
        _fill_constants(norm, n, mine)
        for group in range(groups):
            products, gradients = 0.0, 0.0
            for i in range(group * size, group * size + size):
                products += weight[i] * partial[n, i]
                gradients += weight[i] * partial[n, c + i]
            inverse = np.float64(moments[n, 1, group])
            for i in range(group * size, group * size + size):
                mine[c + i] = inverse
                mine[3 * c + i] = weight[i]
                mine[4 * c + i] = -inverse * inverse * products / (size * pixels)
                mine[5 * c + i] = gradients / (size * pixels)
        propagate(flat, at, dy_flat, at, dx_flat, at, mine, 0, mine, SUMS * c, pixels, c, 0)


@kernel
def layer_norm_forward(items, x, y, moments, weight, bias, epsilon):
    """Store the moments of each pixel, and y."""
    pixels, c = x.shape[1], x.shape[2]
    for n in range(items.start, items.stop):
        for p in range(pixels):
            row, result = x[n, p], y[n, p]
            total = 0.0
            for i in range(c):
                total += row[i]
            mean, square = np.float32(total / c), 0.0
            for i in range(c):
                distance = np.float64(row[i] - mean)
                square += distance * distance
            inverse = np.float32(1.0 / math.sqrt(square / c + epsilon))
            for i in range(c):
                result[i] = (row[i] - mean) * inverse * weight[i] + bias[i]
            moments[n, 0, p], moments[n, 1, p] = mean, inverse


@kernel
def layer_norm_sums(items, x, dy, moments, partial):
    """Store Σ dy · x̂ and Σ dy of each channel of each sample."""
    pixels, c = x.shape[1], x.shape[2]
    for n in range(items.start, items.stop):
        products, gradients = partial[n, :c], partial[n, c:]
        products[:] = 0.0
        gradients[:] = 0.0
        for p in range(pixels):
            row, gradient = x[n, p], dy[n, p]
            mean, inverse = moments[n, 0, p], moments[n, 1, p]
            for i in range(c):
                products[i] += gradient[i] * ((row[i] - mean) * inverse)
                gradients[i] += gradient[i]


@kernel
def layer_norm_backward(items, x, dy, dx, moments, weight):
    """dx = (w dy − mean of w dy − x̂ · mean of w dy x̂) / deviation; means are those of a pixel."""
    pixels, c = x.shape[1], x.shape[2]
    for n in range(items.start, items.stop):
        for p in range(pixels):
            row, gradient, result = x[n, p], dy[n, p], dx[n, p]
            mean, inverse = moments[n, 0, p], moments[n, 1, p]
            products, total = 0.0, 0.0
            for i in range(c):
                product = np.float64(weight[i] * gradient[i])
                total += product
                products += product * np.float64((row[i] - mean) * inverse)
            products, total = products / c, total / c
            for i in range(c):
                normalised = (row[i] - mean) * inverse
                value = weight[i] * gradient[i] - np.float32(total)
                result[i] = inverse * (value - normalised * np.float32(products))
