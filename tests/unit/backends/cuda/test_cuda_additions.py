"""Gradients of a tensor that many layers read: each kernel adds to what is stored."""

from __future__ import annotations

import numpy as np
import pytest

from dptrain.api import make_replica
from dptrain.network import (
    Add,
    BatchNorm2d,
    ChannelShuffle,
    ChannelSlice,
    Concatenate,
    Conv2d,
    Flatten,
    GlobalAveragePool2d,
    GlobalMaxPool2d,
    GroupNorm,
    Input,
    LayerNorm,
    MeanSquaredError,
    Multiply,
    Network,
    SiLU,
)
from dptrain.network.functional import Tensor
from dptrain.plan.lowering import Phase
from tests.unit.backends.cuda.test_cuda_backend import batch


def readers(x: Tensor) -> list[Tensor]:
    """Return tensors of the shape of `x`, (16, H, W), that are computed from it."""
    gate = Conv2d(16, 1)(GlobalAveragePool2d()(x))
    mask = Conv2d(1, 1)(x)
    half = ChannelSlice(4, 8)(x)
    return [
        x * gate, Multiply()(x, GlobalMaxPool2d()(x)), mask * x, ChannelShuffle(4)(x),
        LayerNorm()(x), GroupNorm(2)(x), BatchNorm2d()(x), Conv2d(16, 3, groups=16)(x),
        Conv2d(16, 3, groups=2)(x), Conv2d(16, 1)(x),
        Conv2d(16, 1)(Concatenate(3)(x, half, x)),
    ]  # fmt: skip


@pytest.mark.more
@pytest.mark.parametrize(("precision", "bound"), [("fp32", 3e-5), ("bf16", 6e-2)])
def test_every_reader_of_a_tensor_adds_to_its_gradient(precision: str, bound: float) -> None:
    x = SiLU()(Conv2d(16, 3)(Input((3, 6, 7))))
    branches = readers(x)
    output = Flatten()(Conv2d(8, 1)(Add(len(branches))(*branches)))
    network = Network.from_output(output, loss=MeanSquaredError())
    ours = make_replica(network, "cuda", 3, precision=precision)
    assert not any(group.separate for group in ours.plan.groups)
    assert sum(len(group.adds) for group in ours.plan.groups) >= len(branches)
    assert Phase.BACKWARD_ADD not in {stage.phase for stage in ours.plan.stages}
    reference = make_replica(network, "reference", 3)
    for name in ours.parameters:
        reference.parameters[name] = ours.parameters[name]
    for each in (ours, reference):
        each.forward_backward(*batch(network, 3))
    for name, gradient in reference.gradients.items():
        largest = np.abs(gradient).max()
        np.testing.assert_allclose(ours.gradients[name], gradient, atol=bound * largest)
