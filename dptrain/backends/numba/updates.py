"""Update kernels: one pass over the flat arrays; items are elements."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.numba.vector import LINE, prefetch_for_writing
from dptrain.native.jit import Items, inlined, kernel

Array = NDArray[Any]

_BLOCK = 512
"""Elements of the parameters that are prefetched at a time, while the block before is updated."""

TINY = np.float32(1e-30)
"""State below this value is set to zero. Without gradients, momentum decays into denormal numbers,
on which processors are slow: model0's update took 33 times as long when two thirds were
denormal."""


class Segments(NamedTuple):
    """Ranges of elements that are updated alike.

    Attributes:
        bounds: int64 (segments + 1,), the first element of each, and the end.
        decays: float32 (segments,), the weight decay λ of each.
        factors: float32 (segments,), by which the learning rate α of each is multiplied.
    """

    bounds: Array
    decays: Array
    factors: Array


@inlined
def _flushed(value: Any) -> Any:
    """Return zero for a tiny value; NaN stays NaN."""
    return np.float32(0.0) if abs(value) < TINY else value


@inlined
def _overlap(start: int, stop: int, segments: Segments, k: int) -> tuple[Any, Any]:
    """Return the intersection of segment k with [start, stop), possibly empty, as unsigned
    numbers.
    """
    first = max(start, segments.bounds[k])
    return np.uintp(first), np.uintp(max(first, min(stop, segments.bounds[k + 1])))


@inlined
def _prefetch_block(w: Array, start: int, stop: int) -> None:
    """Prefetch a block of parameters for writing.

    Other threads and ranks have read the parameters in the forward pass, so their caches hold
    copies, and a store waits until all copies are invalid. Prefetches overlap these waits, stores
    do not.
    """
    for i in range(start, min(start + _BLOCK, stop), LINE):
        prefetch_for_writing(w, i)


@kernel
def sgd(items: Items, w: Array, g: Array, segments: Segments, learning_rate: float) -> None:
    """w ← w − α (g + λ w)."""
    rate = np.float32(learning_rate)
    for block in range(items.start, items.stop, _BLOCK):
        end = min(block + _BLOCK, items.stop)
        _prefetch_block(w, end, items.stop)
        for k in range(segments.decays.size):
            decay_k, rate_k = segments.decays[k], rate * segments.factors[k]
            first, last = _overlap(block, end, segments, k)
            for i in range(first, last):
                w[i] -= rate_k * (g[i] + decay_k * w[i])


@kernel
def sgd_momentum(
    items: Items, w: Array, g: Array, v: Array, segments: Segments, momentum: float, nesterov: bool,
    learning_rate: float,
) -> None:  # fmt: skip
    """v ← μ v + d;  w ← w − α (d + μ v) under Nesterov, else w − α v, with d = g + λ w."""
    rate, mu = np.float32(learning_rate), np.float32(momentum)
    # Both rules are w − α (p d + q v).
    p, q = (np.float32(1.0), mu) if nesterov else (np.float32(0.0), np.float32(1.0))
    for block in range(items.start, items.stop, _BLOCK):
        end = min(block + _BLOCK, items.stop)
        _prefetch_block(w, end, items.stop)
        for k in range(segments.decays.size):
            decay_k, rate_k = segments.decays[k], rate * segments.factors[k]
            first, last = _overlap(block, end, segments, k)
            for i in range(first, last):
                d = g[i] + decay_k * w[i]
                v[i] = _flushed(mu * v[i] + d)
                w[i] -= rate_k * (p * d + q * v[i])


@kernel
def adam(
    items: Items, w: Array, g: Array, moments: tuple[Array, Array], segments: Segments,
    constants: tuple[float, float, float], learning_rate: float, step: int,
) -> None:  # fmt: skip
    """w ← w − α (m / (1 − β₁ᵗ)) / (sqrt(v / (1 − β₂ᵗ)) + ε)."""
    (m, v), (beta1, beta2, epsilon) = moments, constants
    b1, b2, eps = np.float32(beta1), np.float32(beta2), np.float32(epsilon)
    c1, c2 = np.float32(1.0 - beta1), np.float32(1.0 - beta2)
    rate = np.float32(learning_rate / (1.0 - beta1**step))
    correction = np.float32(1.0 / np.sqrt(1.0 - beta2**step))
    for block in range(items.start, items.stop, _BLOCK):
        end = min(block + _BLOCK, items.stop)
        _prefetch_block(w, end, items.stop)
        for k in range(segments.decays.size):
            decay_k, rate_k = segments.decays[k], rate * segments.factors[k]
            first, last = _overlap(block, end, segments, k)
            for i in range(first, last):
                d = g[i] + decay_k * w[i]
                m[i] = _flushed(b1 * m[i] + c1 * d)
                v[i] = _flushed(b2 * v[i] + c2 * d * d)
                w[i] -= rate_k * m[i] / (np.sqrt(v[i]) * correction + eps)


@kernel
def adamw(
    items: Items, w: Array, g: Array, moments: tuple[Array, Array], segments: Segments,
    constants: tuple[float, float, float], learning_rate: float, step: int,
) -> None:  # fmt: skip
    """w ← (1 − α λ) w − α (m / (1 − β₁ᵗ)) / (sqrt(v / (1 − β₂ᵗ)) + ε)."""
    (m, v), (beta1, beta2, epsilon) = moments, constants
    b1, b2, eps = np.float32(beta1), np.float32(beta2), np.float32(epsilon)
    c1, c2 = np.float32(1.0 - beta1), np.float32(1.0 - beta2)
    rate = np.float32(learning_rate / (1.0 - beta1**step))
    correction = np.float32(1.0 / np.sqrt(1.0 - beta2**step))
    for block in range(items.start, items.stop, _BLOCK):
        end = min(block + _BLOCK, items.stop)
        _prefetch_block(w, end, items.stop)
        for k in range(segments.decays.size):
            rate_k = rate * segments.factors[k]
            shrink = np.float32(learning_rate * segments.decays[k] * segments.factors[k])
            first, last = _overlap(block, end, segments, k)
            for i in range(first, last):
                m[i] = _flushed(b1 * m[i] + c1 * g[i])
                v[i] = _flushed(b2 * v[i] + c2 * g[i] * g[i])
                w[i] -= rate_k * m[i] / (np.sqrt(v[i]) * correction + eps) + shrink * w[i]


@kernel
def rmsprop(
    items: Items, w: Array, g: Array, state: tuple[Array, Array], segments: Segments,
    constants: tuple[float, float, float], learning_rate: float,
) -> None:  # fmt: skip
    """b ← μ b + d / (sqrt(v) + ε);  w ← w − α b, with v the mean of d², and d = g + λ w.

    With μ = 0, b is not stored.
    """
    (v, b), (rho, epsilon, momentum) = state, constants
    r, mu, eps = np.float32(rho), np.float32(momentum), np.float32(epsilon)
    rest, rate = np.float32(1.0 - rho), np.float32(learning_rate)
    for block in range(items.start, items.stop, _BLOCK):
        end = min(block + _BLOCK, items.stop)
        _prefetch_block(w, end, items.stop)
        for k in range(segments.decays.size):
            decay_k, rate_k = segments.decays[k], rate * segments.factors[k]
            first, last = _overlap(block, end, segments, k)
            for i in range(first, last):
                d = g[i] + decay_k * w[i]
                v[i] = _flushed(r * v[i] + rest * d * d)
                d /= np.sqrt(v[i]) + eps
                if mu > 0.0:
                    b[i] = d = _flushed(mu * b[i] + d)
                w[i] -= rate_k * d


@kernel
def lamb_direction(
    items: Items, w: Array, g: Array, moments: tuple[Array, Array], segments: Segments,
    constants: tuple[float, float, float], step: int,
) -> None:  # fmt: skip
    """g ← (m / (1 − β₁ᵗ)) / (sqrt(v / (1 − β₂ᵗ)) + ε) + λ w, with m and v of Adam."""
    (m, v), (beta1, beta2, epsilon) = moments, constants
    b1, b2, eps = np.float32(beta1), np.float32(beta2), np.float32(epsilon)
    c1, c2 = np.float32(1.0 - beta1), np.float32(1.0 - beta2)
    rate = np.float32(1.0 / (1.0 - beta1**step))
    correction = np.float32(1.0 / np.sqrt(1.0 - beta2**step))
    for k in range(segments.decays.size):
        decay_k = segments.decays[k]
        first, last = _overlap(items.start, items.stop, segments, k)
        for i in range(first, last):
            m[i] = _flushed(b1 * m[i] + c1 * g[i])
            v[i] = _flushed(b2 * v[i] + c2 * g[i] * g[i])
            g[i] = rate * m[i] / (np.sqrt(v[i]) * correction + eps) + decay_k * w[i]


@kernel
def scale_layers(items: Items, w: Array, g: Array, segments: Segments) -> None:
    """g ← r (g + λ w), where r is the factor of a segment."""
    for k in range(segments.decays.size):
        decay_k, factor = segments.decays[k], segments.factors[k]
        first, last = _overlap(items.start, items.stop, segments, k)
        for i in range(first, last):
            g[i] = factor * (g[i] + decay_k * w[i])


@kernel
def add_squares(items: Items, g: Array, squares: Array) -> None:
    """squares[i] ← Σ g² over elements 16 i … 16 i + 15, in float64. Items are sums."""
    for i in range(items.start, items.stop):
        total = 0.0
        for k in range(LINE):
            value = np.float64(g[LINE * i + k])
            total += value * value
        squares[i] = total


@kernel
def scale(items: Items, g: Array, factor: float) -> None:
    """g ← factor · g."""
    f = np.float32(factor)
    for i in range(items.start, items.stop):
        g[i] *= f


@kernel
def add(items: Items, target: Array, source: Array) -> None:
    """Target ← target + source."""
    for i in range(items.start, items.stop):
        target[i] += source[i]


@kernel
def copy(items: Items, target: Array, source: Array) -> None:
    """Target ← source."""
    for i in range(items.start, items.stop):
        target[i] = source[i]


@kernel
def average(items: Items, mean: Array, w: Array, weight: float) -> None:
    """Mean ← mean + weight (w − mean)."""
    new = np.float32(weight)
    for i in range(items.start, items.stop):
        mean[i] += new * (w[i] - mean[i])
