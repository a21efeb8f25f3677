"""Convolutions with groups, with strides that differ between rows and columns."""

from __future__ import annotations

import numpy as np
import pytest

from dptrain.api import make_replica
from dptrain.network import Conv2d, Flatten, MeanSquaredError, Network
from tests.unit.backends.cuda.test_cuda_backend import assert_close, batch, rounding
from tests.unit.backends.pytorch_reference import ROUNDOFFS

GROUPED = Network(
    (3, 9, 11),
    [
        Conv2d(6, 2), Conv2d(6, (3, 2), stride=(2, 1), padding=2, groups=3),
        Conv2d(4, (2, 4), stride=(1, 3), padding="same", groups=2), Flatten(),
    ],
    MeanSquaredError(), name="grouped",
)  # fmt: skip
DEPTHWISE = Network(
    (3, 9, 11),
    [
        Conv2d(6, 2), Conv2d(6, (3, 2), stride=(2, 1), padding=2, groups=6),
        Conv2d(6, (2, 4), stride=(1, 3), padding="same", groups=6), Flatten(),
    ],
    MeanSquaredError(), name="depthwise",
)  # fmt: skip


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.more)])
@pytest.mark.parametrize("network", [GROUPED, DEPTHWISE], ids=lambda network: network.name)
def test_unequal_strides_equal_the_reference(network: Network, precision: str) -> None:
    """The first convolution has no groups: it receives the gradient of the inputs."""
    n = 2
    ours = make_replica(network, "cuda", n, precision=precision)
    reference = make_replica(network, "reference", n)
    for name in ours.parameters:
        reference.parameters[name] = ours.parameters[name]
    x, y = batch(network, n)
    losses = [replica.forward_backward(x, y) for replica in (ours, reference)]
    tolerance = rounding(network, n) + 4 * ROUNDOFFS.get(precision, 0.0)
    assert_close(*losses, tolerance)
    for name, gradient in reference.gradients.items():
        assert_close(ours.gradients[name], gradient, tolerance, name)
    assert np.abs(reference.gradients["conv1.weight"]).max() > 0.0
