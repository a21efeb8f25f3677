"""Two training steps of a small network, for compute-sanitizer.

    compute-sanitizer --tool memcheck python tests/gpu/sanitizer_step.py bf16

The network uses the convolution kernels for few and for many channels, every epilogue, local
response normalisation, pooling, dropout, and fully connected layers with split-K.
"""

from __future__ import annotations

import sys

import cupy
import numpy as np

import dptrain
from dptrain.network import (
    Conv2d,
    Dense,
    Dropout,
    Flatten,
    LocalResponseNorm,
    MaxPool2d,
    Network,
    ReLU,
    SoftmaxCrossEntropy,
)
from dptrain.plan import SGD

SAMPLES = 8


def small_network() -> Network:
    """Return a network for inputs of shape (3, 16, 16) and 10 classes."""
    layers = [
        Conv2d(32, 3, padding=1), ReLU(), MaxPool2d(2),
        Conv2d(64, 3, padding=1), ReLU(), MaxPool2d(2), Dropout(0.25),
        Conv2d(32, 3, padding=1), ReLU(), LocalResponseNorm(), MaxPool2d(3, stride=1),
        Conv2d(32, 2, stride=2), ReLU(),
        Flatten(), Dense(256), ReLU(), Dropout(0.5), Dense(10),
    ]  # fmt: skip
    return Network((3, 16, 16), layers, SoftmaxCrossEntropy(), "sanitizer")


def main(precision: str) -> None:
    """Train two steps, and predict once, in a precision."""
    # Without a memory pool, each array is an allocation of its own, so that memcheck detects
    # accesses beyond its end.
    cupy.cuda.set_allocator(None)
    random = np.random.default_rng(0)
    x = random.standard_normal((SAMPLES, 3, 16, 16), dtype=np.float32)
    y = random.integers(0, 10, SAMPLES)
    replica = dptrain.make_replica(
        small_network(), "cuda", SAMPLES, precision=precision, optimizer=SGD(momentum=0.9)
    )
    for step in range(2):
        loss = replica.forward_backward(x, y, step=step)
        assert np.isfinite(loss), loss
        replica.update(0.01)
    assert np.isfinite(replica.predict(x)).all()


if __name__ == "__main__":
    main(sys.argv[1])
