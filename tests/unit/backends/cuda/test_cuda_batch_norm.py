"""Batch normalisation of whole networks on the emulator: sums over ranks, and folding."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from dptrain.api import make_replica
from dptrain.backends.device_replica import DeviceReplica, SummedStatistics
from dptrain.backends.replica import Replica
from dptrain.network import (
    Add,
    BatchNorm2d,
    Conv2d,
    Dense,
    Flatten,
    GlobalAveragePool2d,
    MeanSquaredError,
    Network,
    NodeSpec,
    ReLU,
    SiLU,
)
from dptrain.network.activations import ELU, HardSwish, ReLU6
from dptrain.network.elementwise import Activation

BLOCK = Network.from_nodes(
    (3, 6, 5),
    [
        NodeSpec(Conv2d(8, 3, bias=False), "first"),
        NodeSpec(BatchNorm2d(), "norm1"),
        NodeSpec(ReLU(), "start"),
        NodeSpec(Conv2d(8, 3), "second"),
        NodeSpec(BatchNorm2d(), "norm2"),
        NodeSpec(Add(), "sum", ("norm2", "start")),
        NodeSpec(ReLU(), "end"),
        NodeSpec(GlobalAveragePool2d()),
        NodeSpec(Flatten()),
        NodeSpec(Dense(4)),
    ],
)

N = 4


def batch() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    rng = np.random.default_rng(0)
    return rng.standard_normal((N, *BLOCK.input_shape)), rng.integers(0, 4, N)


def replica(*, training: bool = True, recompute: bool = False) -> Replica:
    return make_replica(BLOCK, "cuda", N, seed=1, training=training, recompute=recompute)


def test_sums_over_one_rank_change_no_bit() -> None:
    """The last blocks finish the statistics, or another kernel after the sum over ranks."""
    alone, summed, again = replica(), replica(), replica(recompute=True)
    assert isinstance(summed, DeviceReplica)
    sizes: list[int] = []
    summed.statistics_ranks = 0
    summed.enqueue_statistics_sum = lambda statistics: sizes.append(statistics.array.size)
    losses = {each.forward_backward(*batch()) for each in (alone, summed, again)}
    assert len(losses) == 1
    assert sizes == [17, 17, 16, 16]
    for name, gradient in alone.gradients.items():
        np.testing.assert_array_equal(summed.gradients[name], gradient)
        np.testing.assert_array_equal(again.gradients[name], gradient)
    for name, value in alone.statistics.items():
        np.testing.assert_array_equal(summed.statistics[name], value)
        np.testing.assert_array_equal(again.statistics[name], value)


def test_sums_of_two_equal_ranks_have_the_statistics_of_one() -> None:
    alone, doubled = replica(), replica()
    assert isinstance(doubled, DeviceReplica)

    def twice(statistics: SummedStatistics) -> None:
        array = statistics.array
        doubled.memory.upload(array, 2.0 * doubled.memory.download(array))

    doubled.statistics_ranks = 0
    doubled.enqueue_statistics_sum = twice
    x, y = batch()
    assert doubled.forward_backward(x, y) == pytest.approx(alone.forward_backward(x, y), rel=1e-6)
    for name, gradient in alone.gradients.items():
        largest = np.abs(gradient).max()
        np.testing.assert_allclose(doubled.gradients[name], gradient, atol=1e-5 * largest + 1e-7)


@pytest.mark.parametrize(
    "function",
    [HardSwish(), *(pytest.param(f, marks=pytest.mark.more) for f in (ReLU6(), SiLU(), ELU()))],
    ids=lambda function: function.kind,
)
def test_functions_after_normalisations_are_fused(function: Activation) -> None:
    """The 1×1 convolution with 64 filters also sums the gradient of the one before it."""
    layers = [Conv2d(64, 3), BatchNorm2d(), function, Conv2d(64, 1), BatchNorm2d(), function]
    network = Network((3, 6, 5), [*layers, Flatten()], MeanSquaredError())
    ours, reference = (
        make_replica(network, backend, N, seed=1) for backend in ("cuda", "reference")
    )
    fused = {kind for group in ours.plan.groups for kind in group.kinds[1:]}
    assert type(function) in fused
    assert not any(group.head.layer == function for group in ours.plan.groups)
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((N, 3, 6, 5)), rng.standard_normal((N, 64 * 30))
    for each in (ours, reference):
        each.forward_backward(x, y)
    for name, gradient in reference.gradients.items():
        if name != "conv1.bias" and name != "conv2.bias":  # Normalisations cancel biases.
            largest = np.abs(gradient).max()
            np.testing.assert_allclose(ours.gradients[name], gradient, atol=3e-5 * largest)


def test_inference_folds_normalisations_into_convolutions() -> None:
    trained, inference = replica(), replica(training=False)
    for step in range(3):
        trained.forward_backward(*batch(), step=step)
    for name, value in trained.parameters.items():
        inference.parameters[name] = value
    for name, value in trained.statistics.items():
        inference.statistics[name] = value
    names = [group.name for group in inference.plan.groups]
    assert names[:3] == ["first+norm1+start", "second+norm2", "sum+end"]
    x, y = batch()
    assert inference.evaluate(x, y)[0] == pytest.approx(trained.evaluate(x, y)[0], rel=1e-5)
