"""Biases as layers of their own: names, initial values, and networks that are no chains."""

from __future__ import annotations

import numpy as np
import pytest

from dptrain.backends import load_backend
from dptrain.network import (
    LAYERS,
    Conv2d,
    Dense,
    Flatten,
    MaxPool2d,
    MeanSquaredError,
    Network,
    ReLU,
    get_network,
)
from dptrain.network.biases import BiasAdd, separate_biases
from dptrain.network.initializers import Constant
from dptrain.plan.plan import make_plan


def test_biases_keep_their_initial_values_and_names() -> None:
    network = Network(
        (2, 4, 4),
        [Conv2d(3, 3, padding=1, bias_init=Constant(0.25)), ReLU(), Flatten(), Dense(2)],
    )
    found = separate_biases(network)
    assert [node.name for node in found.nodes] == [
        "conv1", "conv1_bias", "relu1", "flatten1", "dense1", "dense1_bias",
    ]  # fmt: skip
    conv, bias = found.nodes[:2]
    assert isinstance(conv.layer, Conv2d)
    assert conv.layer.bias_init == Constant(0.0)
    assert bias.layer == BiasAdd(Constant(0.25))
    assert [p.shape for p in bias.parameters] == [(3,)]
    assert bias.flops.forward == 48
    assert found.output_shape == network.output_shape
    assert BiasAdd not in LAYERS.values()


@pytest.mark.parametrize("name", ["model0", "cifar", "solar", "mlp-50"])
def test_every_layer_with_a_bias_is_divided(name: str) -> None:
    network = get_network(name)
    found = separate_biases(network)
    weighted = sum(isinstance(layer, Conv2d | Dense) for layer in network.layers)
    assert sum(isinstance(layer, BiasAdd) for layer in found.layers) == weighted
    assert len(found.layers) == len(network.layers) + weighted


SHAPES = {
    "odd channels": ((3, 5, 4), [Conv2d(5, 3, padding=1), MaxPool2d(2, 2)]),
    "vectors": ((3, 4, 4), [Conv2d(16, 3, padding=1), ReLU()]),
    "units": ((7,), [Dense(11), ReLU()]),
}


@pytest.mark.parametrize(
    ("backend", "precision", "threads"),
    [
        ("numba", "fp32", 1),
        ("numba", "fp32", 2),
        ("reference", "fp32", 1),
        ("cuda", "fp32", 1),
        ("cuda", "bf16", 1),
        ("cudnn", "fp32", 1),
    ],
)
@pytest.mark.parametrize("name", SHAPES)
def test_outputs_are_those_of_the_network(
    backend: str, precision: str, threads: int, name: str
) -> None:
    shape, layers = SHAPES[name]
    flatten = [Flatten()] if len(shape) == 3 else []
    network = Network(shape, [*layers, *flatten, Dense(3)], MeanSquaredError())
    chosen, random = load_backend(backend), np.random.default_rng(2)
    chosen.choose_device(0)
    x = random.standard_normal((6, *shape)).astype(np.float32)
    values = {p.name: random.standard_normal(p.shape) for p in network.parameters}
    outputs = []
    for found in (network, separate_biases(network)):
        plan = make_plan(
            found, chosen, 6, precision=precision, training=False, threads=threads,
            fused=found is network,
        )  # fmt: skip
        replica = chosen.make_replica(plan)
        for parameter in replica.parameters:
            replica.parameters[parameter] = np.zeros_like(replica.parameters[parameter])
        for parameter, value in values.items():
            layer, kind = parameter.rsplit(".", 1)
            own = kind == "bias" and found is not network
            replica.parameters[f"{layer}_bias.bias" if own else parameter] = value
        outputs.append(replica.forward(x))
    # In bf16, sums are rounded to 8 bits before the bias is added.
    rounding = 2**-6 if precision == "bf16" else 1e-5
    largest = np.abs(outputs[0]).max()
    np.testing.assert_allclose(outputs[0], outputs[1], rtol=0, atol=rounding * largest)


def test_the_planner_refuses_training() -> None:
    network = separate_biases(Network((4,), [Dense(2)], MeanSquaredError()))
    for name in ("numba", "reference", "cuda", "cudnn"):
        with pytest.raises(AssertionError, match="only in inference"):
            make_plan(network, load_backend(name), 2, training=True)
