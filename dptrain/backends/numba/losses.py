"""Loss kernels: one call adds up the whole batch, in double precision and in order.

Each writes loss · scale and the number of correct answers to sums[0] and sums[1], and, where
`gradient` has rows, the gradient of the loss by z.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.numba.jit import kernel

Array = NDArray[Any]


@kernel
def softmax_cross_entropy(
    start: int, stop: int, thread: int,
    z: Array, labels: Array, gradient: Array, sums: Array, scale: float, backward: bool,
) -> None:  # fmt: skip
    """Loss = −log softmax(z)[label]; dz = (softmax(z) − onehot) · scale."""
    loss, correct = 0.0, 0
    for n in range(start, stop):
        best = 0
        for k in range(1, z.shape[1]):
            if z[n, k] > z[n, best]:
                best = k
        largest = np.float64(z[n, best])
        total = 0.0
        for k in range(z.shape[1]):
            total += np.exp(z[n, k] - largest)
        label = labels[n]
        loss += np.log(total) - (z[n, label] - largest)
        correct += best == label
        if backward:
            for k in range(z.shape[1]):
                share = np.exp(z[n, k] - largest) / total
                gradient[n, k] = (share - (k == label)) * scale
    sums[0] = loss * scale
    sums[1] = correct


@kernel
def sigmoid_cross_entropy(
    start: int, stop: int, thread: int,
    z: Array, target: Array, gradient: Array, sums: Array, scale: float, backward: bool,
) -> None:  # fmt: skip
    """Loss = mean over outputs of log(1 + exp(z)) − z y; dz = (σ(z) − y) · scale / F."""
    loss, correct = 0.0, 0
    outputs = z.shape[1]
    for n in range(start, stop):
        right = True
        for k in range(outputs):
            value, y = np.float64(z[n, k]), np.float64(target[n, k])
            # max(z, 0) is written so that a NaN stays.
            positive = 0.0 if value <= 0.0 else value
            loss += positive - value * y + np.log1p(np.exp(-abs(value)))
            right &= (value > 0.0) == (y > 0.5)
            if backward:
                gradient[n, k] = (0.5 + 0.5 * np.tanh(0.5 * value) - y) * scale / outputs
        correct += right
    sums[0] = loss * scale / outputs
    sums[1] = correct


@kernel
def mean_squared_error(
    start: int, stop: int, thread: int,
    z: Array, target: Array, gradient: Array, sums: Array, scale: float, backward: bool,
) -> None:  # fmt: skip
    """Loss = mean over outputs of (z − y)²; dz = 2 (z − y) · scale / F."""
    loss = 0.0
    outputs = z.shape[1]
    for n in range(start, stop):
        for k in range(outputs):
            d = np.float64(z[n, k]) - np.float64(target[n, k])
            loss += d * d
            if backward:
                gradient[n, k] = 2.0 * d * scale / outputs
    sums[0] = loss * scale / outputs
    sums[1] = 0.0
