"""Batch normalisation: the statistics, the normalisation, and their gradients.

Activations are (N, H·W, C). Items of the kernels that read them are bands: each sample has
`num_bands` of them, which follow from the shape of a sample alone. The sums of a band are float64
rows of `partial` (bands of all samples, 2·C). They are added in the order of the bands for each
micro-shard, so no result depends on threads.

A row of `parts`, and `totals`, has 1 + 2·C elements: the number of elements of a channel, and two
sums of each channel. Those of the forward pass are Σ x and Σ x², which are exact enough in float64:
the relative error of the variance is about 1e-16 · mean² / variance. Those of the backward pass are
Σ dz · x̂ and Σ dz, with x̂ = (x − mean) / deviation.

`moments` is float32 (2, C): mean and 1 / deviation. `scratch` has `ROWS` rows of C for each thread.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.numba.convolution.im2col import part
from dptrain.backends.numba.normalization.channel_passes import (
    normalise,
    propagate,
    sum_deviations,
    sum_gradients,
)
from dptrain.native.jit import inlined, kernel

ROWS = 8
"""Rows of scratch: the six constants of a channel, and two sums."""
SUMS = 6
"""The first row of the sums in scratch."""
BAND = 16384
"""Elements of a band with up to 341 channels: 64 KB of each array stay in the L2 cache, and float32
sums of so few pixels are exact enough. With more channels, bands have `FEWEST_PIXELS`."""
FEWEST_PIXELS = 48
"""Smallest number of pixels of a band. With fewer, the float64 sums of a band take as long as its
pixels: the statistics of 2,048 channels on 7×7 pixels are three times as fast with 49 pixels as
with 8 (39 and 13 GB/s on one core of an AMD EPYC with AVX-512)."""


class ChannelNorm(NamedTuple):
    """A normalisation with a weight and a bias per channel.

    Attributes:
        moments: mean and 1 / deviation, of which samples can have their own.
        weight, bias: (C,).
        bands: number of bands of a sample.
        variant: see `channel_passes`.
    """

    moments: NDArray[Any]
    weight: NDArray[Any]
    bias: NDArray[Any]
    bands: int = 1
    variant: int = 0


def num_bands(pixels: int, channels: int) -> int:
    """Return the number of bands of a sample."""
    return max(1, min(pixels // FEWEST_PIXELS, round(pixels * channels / BAND)))


@inlined
def _band(x, item, bands, c):
    """Return the first element and the number of pixels of a band."""
    pixels = x.shape[1]
    first, last = part(pixels, item % bands, bands)
    return (item // bands * pixels + first) * c, last - first


@kernel
def sum_bands(items, x, partial, bands, scratch):
    """Store Σ x and Σ x² of each channel of each band.

    They are computed from distances from the first pixel, which have about the size of the
    deviation and are therefore added in float32.
    """
    c, flat, mine = x.shape[2], x.reshape(-1), scratch[items.thread]
    for item in range(items.start, items.stop):
        at, count = _band(x, item, bands, c)
        for i in range(c):
            mine[i] = flat[at + i]
        sum_deviations(flat, at, mine, 0, mine, SUMS * c, count, c, 0)
        row, pixels = partial[item], np.float64(count)
        for i in range(c):
            shift, first = np.float64(mine[i]), np.float64(mine[SUMS * c + i])
            row[i] = first + pixels * shift
            second = np.float64(mine[(SUMS + 1) * c + i])
            row[c + i] = second + shift * (2.0 * first + pixels * shift)


@kernel
def sum_samples(items, partial, bounds, bands, pixels, parts):
    """Add the rows of the bands of each micro-shard to a row of parts; items are sums of a row.

    Args:
        bounds: int64 (micro-shards + 1,), the first sample of each, and the end of the last one.
        pixels: of a sample.
    """
    for shard in range(len(parts)):
        row, total = bounds[shard] * bands, parts[shard]
        if items.start == 0:
            total[0] = (bounds[shard + 1] - bounds[shard]) * pixels
        for i in range(items.start, items.stop):
            total[1 + i] = 0.0
        while row < bounds[shard + 1] * bands:
            source = partial[row]
            for i in range(items.start, items.stop):
                total[1 + i] += source[i]
            row += 1


@kernel
def add_parts(items, parts, steps, results, totals):
    """Add the rows of parts in place, in the order of `steps`; items are elements of a row.

    Args:
        steps: int64 (additions, 2), see `dptrain.plan.shards.addition_steps`.
        results: int64, the rows that remain.
    """
    for k in range(len(steps)):
        target, source = parts[steps[k, 0]], parts[steps[k, 1]]
        for i in range(items.start, items.stop):
            target[i] += source[i]
    for i in range(items.start, items.stop):
        totals[i] = 0.0
    for k in range(len(results)):
        source = parts[results[k]]
        for i in range(items.start, items.stop):
            totals[i] += source[i]


@kernel
def finish_statistics(items, totals, moments, running_mean, running_var, epsilon, momentum):
    """Store the moments, and move the running statistics; items are channels.

    An empty minibatch leaves the running statistics as they are.
    """
    step = momentum if totals[0] > 0.0 else 0.0
    c, count = moments.shape[1], max(totals[0], 1.0)
    for i in range(items.start, items.stop):
        mean = totals[1 + i] / count
        variance = max(0.0, totals[1 + c + i] / count - mean * mean)
        moments[0, i] = mean
        moments[1, i] = 1.0 / math.sqrt(variance + epsilon)
        unbiased = variance * (count / max(count - 1.0, 1.0))
        running_mean[i] += step * (mean - running_mean[i])
        running_var[i] += step * (unbiased - running_var[i])


@kernel
def running_moments(items, running_mean, running_var, moments, epsilon):
    """Store the moments that inference and evaluation use; items are channels."""
    for i in range(items.start, items.stop):
        moments[0, i] = running_mean[i]
        moments[1, i] = 1.0 / math.sqrt(running_var[i] + epsilon)


@inlined
def _fill_constants(norm, mine):
    """Fill the first three rows of scratch: mean, factor and bias."""
    moments, weight, c = norm.moments, norm.weight, len(norm.weight)
    for i in range(c):
        mine[i] = moments[0, i]
        mine[c + i] = weight[i] * moments[1, i]
        mine[2 * c + i] = norm.bias[i]


@kernel
def normalise_bands(items, x, x2, y, norm, scratch):
    """Compute y from x and x2, see `channel_passes.normalise`."""
    c, mine = x.shape[2], scratch[items.thread]
    flat, flat2, result = x.reshape(-1), x2.reshape(-1), y.reshape(-1)
    _fill_constants(norm, mine)
    for item in range(items.start, items.stop):
        at, count = _band(x, item, norm.bands, c)
        normalise(flat, at, flat2, at, result, at, mine, 0, mine, 0, count, c, norm.variant)


@kernel
def sum_gradient_bands(items, x, dy, y, dx2, norm, partial, scratch):
    """Store Σ dz · x̂ and Σ dz of each band, see `channel_passes.sum_gradients`."""
    c, mine = x.shape[2], scratch[items.thread]
    x_flat, dy_flat = x.reshape(-1), dy.reshape(-1)
    y_flat, dx2_flat = y.reshape(-1), dx2.reshape(-1)
    _fill_constants(norm, mine)
    for item in range(items.start, items.stop):
        at, count = _band(x, item, norm.bands, c)
        sum_gradients(
            x_flat, at, dy_flat, at, y_flat, at, dx2_flat, at, mine, 0, mine, SUMS * c, count, c,
            norm.variant,
        )  # fmt: skip
        row = partial[item]
        for i in range(c):
            row[i] = np.float64(mine[(SUMS + 1) * c + i]) * np.float64(norm.moments[1, i])
            row[c + i] = np.float64(mine[SUMS * c + i])


@kernel
def round_parts(items, parts, rounded):
    """Store the sums of each micro-shard in float32, in which ranks add them; items are sums."""
    for shard in range(len(parts)):
        for i in range(items.start, items.stop):
            rounded[shard, i] = parts[shard, 1 + i]


@kernel
def store_means(items, totals, means):
    """Store the mean of dz · x̂ and that of dz over the global minibatch; items are 2·C sums."""
    flat, count = means.reshape(-1), max(totals[0], 1.0)
    for i in range(items.start, items.stop):
        flat[i] = totals[1 + i] / count


@kernel
def propagate_bands(items, x, dy, dx, norm, means, scratch):
    """dx = factor · (dz − mean of dz − x̂ · mean of dz · x̂)."""
    c, mine = x.shape[2], scratch[items.thread]
    x_flat, dy_flat, dx_flat = x.reshape(-1), dy.reshape(-1), dx.reshape(-1)
    _fill_constants(norm, mine)
    for i in range(c):
        mine[3 * c + i] = 1.0
        mine[4 * c + i] = -mine[c + i] * norm.moments[1, i] * means[0, i]
        mine[5 * c + i] = means[1, i]
    for item in range(items.start, items.stop):
        at, count = _band(x, item, norm.bands, c)
        propagate(
            x_flat, at, dy_flat, at, dx_flat, at, mine, 0, mine, SUMS * c, count, c, norm.variant
        )  # fmt: skip
