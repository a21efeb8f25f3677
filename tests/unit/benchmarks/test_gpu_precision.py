"""Errors of fp32 layer by layer, as far as they need no GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.batch import random_batch
from benchmarks.check import Expected
from benchmarks.gpu.precision import (
    LayerError,
    layer_errors,
    layer_networks,
    our_results,
    precision_headline,
    precision_table,
    torch_results,
)
from dptrain.network import Conv2d, Dense, Flatten, MaxPool2d, Network, ReLU

pytestmark = pytest.mark.more

NETWORK = Network(
    (3, 8, 6), [Conv2d(4, stride=2), ReLU(), MaxPool2d(2), Flatten(), Dense(6), ReLU(), Dense(3)],
    name="small",
)  # fmt: skip


def test_each_layer_with_weights_is_a_network_with_its_shapes() -> None:
    found = dict(layer_networks(NETWORK))
    assert list(found) == ["conv1", "dense1", "dense2"]
    shapes = {node.name: (node.input_shape, node.layer) for node in NETWORK.nodes}
    for name, layer in found.items():
        assert (layer.input_shape, layer.nodes[0].layer) == shapes[name]


def test_pytorch_computes_the_same_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (torch.Tensor, torch.nn.Module):
        monkeypatch.setattr(kind, "cuda", lambda self: self)
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    for _, layer in layer_networks(NETWORK):
        ours = our_results(layer, "numba", 3)
        theirs = torch_results(layer, *random_batch(layer, 3))
        for name in theirs:
            np.testing.assert_allclose(ours[name].reshape(theirs[name].shape), theirs[name],
                                       1e-4, 1e-5)  # fmt: skip


def test_errors_are_relative_and_compared_with_pytorch() -> None:
    exact = {"output": np.array([[3.0, 4.0]]), "conv1.weight": np.array([2.0]), "loss": np.ones(())}
    expected = Expected(exact, dict.fromkeys(exact, 1.0))
    ours = {"cuda": {"output": np.array([3.0, 4.5]), "conv1.weight": np.array([2.0])}}
    theirs = {"output": np.array([[3.0, 4.25]]), "conv1.weight": np.array([2.5])}
    output, weight = layer_errors("small", 2, "conv1", expected, ours, theirs)
    assert output.ours == {"cuda": pytest.approx(0.1)}
    assert output.ratio("cuda") == pytest.approx(2.0)
    assert (weight.quantity, weight.ratio("cuda")) == ("weight gradient", 0.0)
    rows = precision_table([output]).texts
    assert rows[0][-3:] == ["5.00e-02", "2.00", "0.50 of target"]
    assert precision_headline([output]) == [
        "cuda: 0 of 1 errors of fp32 are at most PyTorch's; the largest is 2.00 times as large"
    ]
    alone = LayerError("small", 2, "conv1", "output", {"cuda": 0.1}, None)
    assert precision_headline([alone]) == []
