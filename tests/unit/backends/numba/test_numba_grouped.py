"""Grouped convolutions: the tables of padded maps, and results next to the reference."""

from __future__ import annotations

import random

import numpy as np
import pytest

import dptrain
from dptrain.backends.numba.convolution.grouped_planning import Axis, backward_axis, forward_axis
from dptrain.network import Conv2d, Dense, Flatten, Network, ReLU

Triples = set[tuple[int, int, int]]
"""Positions of a result, an element of the filter, and a position of the operand."""


def triples(axis: Axis, operands: int) -> Triples:
    """Return what an axis adds; positions outside of the operand contain zeros."""
    found = set()
    for phase in axis.phases:
        for i in range(phase.number):
            for t, tap in enumerate(phase.taps):
                padded = phase.source + i * phase.source_step + t * phase.tap_step
                assert 0 <= padded < axis.size
                source = padded - axis.before
                if 0 <= source < operands:
                    found.add((phase.first + i * phase.step, tap, source))
    return found


@pytest.mark.parametrize("seed", range(200))
def test_axes_contain_every_product_of_a_convolution_once(seed: int) -> None:
    rng = random.Random(seed)
    window, stride, dilation = rng.randint(1, 7), rng.randint(1, 4), rng.randint(1, 3)
    pad = rng.randint(0, 2 * window)
    size = rng.randint(max(1, (window - 1) * dilation + 1 - 2 * pad), 24)
    out = (size + 2 * pad - (window - 1) * dilation - 1) // stride + 1
    forward = {
        (i, tap, source)
        for i in range(out)
        for tap in range(window)
        if 0 <= (source := i * stride + tap * dilation - pad) < size
    }
    assert triples(forward_axis(pad, stride, dilation, window, out), size) == forward
    backward = triples(backward_axis(pad, stride, dilation, window, size), out)
    assert backward == {(source, tap, i) for i, tap, source in forward}


def network(seed: int) -> Network:
    """Return a random grouped or depthwise convolution between two layers with parameters."""
    rng = random.Random(seed)
    groups, channels = rng.choice([(3, 1), (4, 2), (2, 5), (5, 3), (40, 1), (1, 1), (2, 20)])
    filters = channels if rng.random() < 0.5 else rng.randint(1, 6)
    window = rng.randint(1, 7), rng.randint(1, 7)
    convolution = Conv2d(
        groups * filters, window, stride=(rng.randint(1, 3), rng.randint(1, 3)), padding="same",
        groups=groups, bias=rng.random() < 0.5, dilation=(rng.randint(1, 2), rng.randint(1, 3)),
    )  # fmt: skip
    size = rng.randint(1, 15), rng.randint(1, 15)
    first = Conv2d(groups * channels, 1)
    return Network((3, *size), [first, convolution, ReLU(), Flatten(), Dense(3)])


@pytest.mark.parametrize("seed", range(12))
def test_gradients_equal_those_of_the_reference(seed: int) -> None:
    found = network(seed)
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((3, *found.input_shape), np.float32)
    y = rng.integers(0, 3, 3)
    replicas = [dptrain.make_replica(found, backend, 3) for backend in ("numba", "reference")]
    losses = [replica.forward_backward(x, y) for replica in replicas]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for name, gradient in replicas[1].gradients.items():
        scale = 1e-5 * (np.abs(gradient).max() + 1e-3)
        np.testing.assert_allclose(replicas[0].gradients[name], gradient, rtol=1e-4, atol=scale)
