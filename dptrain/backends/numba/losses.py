"""Loss kernels, in double precision.

Items are samples. Each kernel writes the loss of sample n to found[n, 0] and whether its prediction
is correct to found[n, 1], and if `backward` also the gradient of the loss with respect to z.
`sum_losses` then adds the samples of each micro-shard in order, so sums do not depend on threads.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from dptrain.backends.numba.activations import DOUBLE
from dptrain.backends.numba.vector import I64
from dptrain.native.jit import Items, Kernel, inlined, kernel
from dptrain.network.expression_code import without_extrema, write
from dptrain.network.expressions import parse
from dptrain.network.losses import ElementwiseLoss, Loss, SoftmaxSquaredError

Array = NDArray[Any]

ROUNDING = 1.5 * 2.0**52
"""Adding this to a small number rounds it to an integer in the lowest bits."""
LOG2_E = 1.4426950408889634
LN2_HIGH, LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
"""The first has trailing zeros, so that integer multiples of it are exact."""
GRAIN = 320
"""Outputs whose losses are worth one more thread: 1 to 2 µs."""
SMALLEST = -708.0
"""Smallest argument of exp; smaller ones are replaced by it, because exp is near the smallest
normal number."""


@intrinsic
def _power_of_two(typingctx, value):
    """2ᵏ for a value k + `ROUNDING`."""

    def codegen(context, builder, sig, args):
        exponent = builder.add(builder.bitcast(args[0], I64), I64(1023))
        return builder.bitcast(builder.shl(exponent, I64(52)), ir.DoubleType())

    return types.float64(types.float64), codegen


@inlined
def _exp(x: float) -> Any:
    """exp(x) for x ≤ 0 within two units in the last place; unlike the C library's, it is
    vectorised.

    x = k ln 2 + r with |r| ≤ ln 2 / 2, and a Taylor series in r whose next term is below 5e-18.
    """
    x = SMALLEST if x < SMALLEST else x
    shifted = x * LOG2_E + ROUNDING
    k = shifted - ROUNDING
    r = (x - k * LN2_HIGH) - k * LN2_LOW
    p = 1.0 / 6227020800.0
    p = p * r + 1.0 / 479001600.0
    p = p * r + 1.0 / 39916800.0
    p = p * r + 1.0 / 3628800.0
    p = p * r + 1.0 / 362880.0
    p = p * r + 1.0 / 40320.0
    p = p * r + 1.0 / 5040.0
    p = p * r + 1.0 / 720.0
    p = p * r + 1.0 / 120.0
    p = p * r + 1.0 / 24.0
    p = p * r + 1.0 / 6.0
    p = p * r + 0.5
    p = p * r + 1.0
    p = p * r + 1.0
    return p * _power_of_two(shifted)


@inlined
def _largest(z: Array, n: int) -> Any:
    """Return the index of the first of the largest elements of row n, and whether one is NaN."""
    best, largest, is_nan = 0, z[n, 0], z[n, 0] != z[n, 0]
    for k in range(1, z.shape[1]):
        value = z[n, k]
        best = k if value > largest else best
        largest = value if value > largest else largest
        is_nan |= value != value
    return best, is_nan


@kernel
def softmax_cross_entropy(
    items: Items,
    z: Array, labels: Array, gradient: Array, found: Array,
    scratch: Array, scale: float, backward: bool,
) -> None:  # fmt: skip
    """Loss = −log softmax(z)[label]; dz = (softmax(z) − onehot) · scale.

    Args:
        scratch: float64 (threads, rows, F) for as many samples as are processed at a time, so that
            their exponentials are computed in one vectorised loop.
    """
    classes, powers = z.shape[1], scratch[items.thread]
    flat = powers.reshape(-1)
    for first in range(items.start, items.stop, len(powers)):
        rows = min(len(powers), items.stop - first)
        for n in range(first, first + rows):
            (best, is_nan), label = _largest(z, n), labels[n]
            largest = np.float64(z[n, best])
            found[n, 0], found[n, 1] = largest - z[n, label], best == label and not is_nan
            for k in range(classes):
                powers[n - first, k] = z[n, k] - largest
        for i in range(np.uintp(rows * classes)):
            flat[i] = _exp(flat[i])
        for n in range(first, first + rows):
            total = 0.0
            for k in range(classes):
                total += powers[n - first, k]
            found[n, 0] += np.log(total)
            if backward:
                share = scale / total
                for k in range(classes):
                    gradient[n, k] = powers[n - first, k] * share
                label = labels[n]
                gradient[n, label] = (powers[n - first, label] / total - 1.0) * scale


@kernel
def smooth_labels(
    items: Items,
    z: Array, labels: Array, gradient: Array, found: Array, smoothing: float, scale: float,
) -> None:  # fmt: skip
    """Change loss and gradient of `softmax_cross_entropy` to those of smoothed labels.

    With smoothing s the target is (1 − s) onehot + s / F instead of onehot, so that the loss grows
    by s (z[label] − mean(z)), and dz by s (onehot − 1 / F) · scale.
    """
    classes = z.shape[1]
    share = smoothing / classes * scale
    for n in range(items.start, items.stop):
        total, label = 0.0, labels[n]
        for k in range(classes):
            total += z[n, k]
            gradient[n, k] -= share
        gradient[n, label] += smoothing * scale
        found[n, 0] += smoothing * (z[n, label] - total / classes)


@kernel
def weigh_losses(items: Items, gradient: Array, found: Array, weights: Array) -> None:
    """Multiply the losses of the samples and their gradients by the weights."""
    for n in range(items.start, items.stop):
        weight = weights[n]
        found[n, 0] *= weight
        for k in range(gradient.shape[1]):
            gradient[n, k] *= weight


def softmax_scratch(classes: int, threads: int) -> NDArray[np.float64]:
    """Return scratch of at most 2 KB for each thread, or for one sample."""
    return np.zeros((threads, max(256 // classes, 1), classes))


@kernel
def softmax_squared_error(
    items: Items,
    z: Array, labels: Array, gradient: Array, found: Array, scale: float, backward: bool,
) -> None:  # fmt: skip
    """Loss = mean over classes of d², where p = softmax(z) and d = p − onehot;
    dz = 2 p (d − Σ p d) · scale / F.
    """
    classes = z.shape[1]
    for n in range(items.start, items.stop):
        (best, is_nan), label = _largest(z, n), labels[n]
        largest = np.float64(z[n, best])
        others, powers, squares = 0.0, 0.0, 0.0
        for k in range(classes):
            power = _exp(np.float64(z[n, k]) - largest)
            powers += power
            others += power if k != label else 0.0
            squares += power * power if k != label else 0.0
        # d of the label is −others / Σ, which does not cancel for p close to 1.
        own = _exp(np.float64(z[n, label]) - largest)
        squares /= powers * powers
        rest = others / powers
        found[n, 0] = (squares + rest * rest) / classes
        found[n, 1] = best == label and not is_nan
        if backward:
            share = 2.0 * scale / classes
            mean = squares - own / powers * rest
            for k in range(classes):
                p = _exp(np.float64(z[n, k]) - largest) / powers
                gradient[n, k] = share * p * ((-rest if k == label else p) - mean)


@functools.cache
def elementwise(kind: str, targets: str, value: str, slope: str) -> Kernel:
    """Return the kernel of a loss that is the mean over outputs of a function f(z, y).

    Its arguments are those of `softmax_squared_error` with targets (n, F) for labels, and
    dz = f′ · scale / F.

    Args:
        kind: name of the loss.
        targets: kind of the targets. A prediction is correct if every output is on the side of ½ of
            its target, if they are ``binary``; no prediction is, otherwise.
        value, slope: f and its derivative by z as text in terms of z and y.
    """
    name = f"{kind}_loss"
    code, gradient = (
        write(without_extrema(parse(each, ["z", "y"])), DOUBLE) for each in (value, slope)
    )
    is_right = ["right &= (z > 0.0) == (y > 0.5) and z == z"] if targets == "binary" else []
    lines = [
        f"def {name}(items, z_array, y_array, gradient, found, scale, backward):",
        "    ONE, ZERO = np.float64(1.0), np.float64(0.0)",
        "    outputs = z_array.shape[1]",
        "    for n in range(items.start, items.stop):",
        f"        loss, right = 0.0, {targets == 'binary'}",
        "        for k in range(outputs):",
        "            z, y = np.float64(z_array[n, k]), np.float64(y_array[n, k])",
        *(
            f"            {line}"
            for line in (*code.statements, f"loss += {code.result}", *is_right)
        ),
        "            if backward:",
        *(f"                {line}" for line in gradient.statements),
        f"                gradient[n, k] = {gradient.result} * scale / outputs",
        "        found[n, 0], found[n, 1] = loss / outputs, right",
    ]
    text = "\n".join(lines) + "\n"
    namespace: dict[str, Any] = {"np": np, "math": math, "__name__": __name__}
    # The text consists of the templates of `DOUBLE`, finite numbers and the names above.
    exec(compile(text, f"{kind}.py", "exec"), namespace)
    return Kernel(namespace[name], text, ("elementwise", kind, targets, value, slope))


def kernel_of(loss: Loss) -> Kernel:
    """Return the kernel of a loss; only that of softmax cross-entropy has scratch memory."""
    if isinstance(loss, ElementwiseLoss):
        return elementwise(loss.kind, loss.targets, str(loss.value), str(loss.slope))
    is_squared = isinstance(loss, SoftmaxSquaredError)
    return softmax_squared_error if is_squared else softmax_cross_entropy


@kernel
def sum_losses(items: Items, found: Array, sums: Array, bounds: Array, scale: float) -> None:
    """sums[r] = the sum over the samples of micro-shard r of (loss · scale, correct).

    Items are micro-shards; number r consists of samples bounds[r] … bounds[r + 1].
    """
    for row in range(items.start, items.stop):
        loss, correct = 0.0, 0.0
        for n in range(bounds[row], bounds[row + 1]):
            loss += found[n, 0]
            correct += found[n, 1]
        sums[row, 0], sums[row, 1] = loss * scale, correct
