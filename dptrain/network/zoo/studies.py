"""Small networks of studies of data-parallel training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from dptrain.network.activations import ReLU
from dptrain.network.initializers import Constant, Normal
from dptrain.network.layers import (
    Conv2d,
    Dense,
    Dropout,
    Flatten,
    Layer,
    LocalResponseNorm,
    MaxPool2d,
    Shape,
)
from dptrain.network.losses import (
    Loss,
    MeanSquaredError,
    SigmoidBinaryCrossEntropy,
    SoftmaxCrossEntropy,
)
from dptrain.network.network import Network
from dptrain.network.zoo.recipes import IMAGES, VALUES, Entry, Recipe


def dense_layers(units: Sequence[int]) -> list[Layer]:
    """Return dense layers with a ReLU after each except the last."""
    layers: list[Layer] = []
    for i, count in enumerate(units):
        layers += [ReLU(), Dense(count)] if i else [Dense(count)]
    return layers


def _convolutional(
    name: str,
    filters: Sequence[int],
    units: Sequence[int],
    loss: type[Loss],
    input_shape: Shape,
    outputs: int,
) -> Network:
    """Return a network of [conv 3×3, ReLU, max-pool 2] for each of `filters`, then dense layers."""
    layers: list[Layer] = []
    for count in filters:
        layers += [Conv2d(count, padding=1), ReLU(), MaxPool2d(2)]
    layers += [Flatten(), *dense_layers([*units, outputs])]
    return Network(input_shape, layers, loss(), name)


def _solar(input_shape: Shape, outputs: int) -> Network:
    # The network ends in a ReLU. If the last unit were negative for every map at the start, its
    # gradient would be 0 and it would never learn, so it starts close to one half.
    last = Dense(outputs, weight_init=Normal(0.01), bias_init=Constant(0.5))
    layers = [
        Conv2d(32, padding="valid"),
        ReLU(),
        Conv2d(64, padding="valid"),
        ReLU(),
        MaxPool2d(2),
        Dropout(0.25),
        Flatten(),
        Dense(128),
        ReLU(),
        Dropout(0.5),
        last,
        ReLU(),
    ]
    return Network(input_shape, layers, MeanSquaredError(), "solar")


def _cifar(input_shape: Shape, outputs: int) -> Network:
    start, tenth = Normal(0.05), Constant(0.1)
    wide = partial(Dense, weight_init=Normal(0.04), bias_init=tenth, weight_decay=0.004)
    layers = [
        Conv2d(64, 5, weight_init=start),
        ReLU(),
        MaxPool2d(3, 2, "same"),
        LocalResponseNorm(),
        Conv2d(64, 5, weight_init=start, bias_init=tenth),
        ReLU(),
        LocalResponseNorm(),
        MaxPool2d(3, 2, "same"),
        Flatten(),
        wide(384),
        ReLU(),
        wide(192),
        ReLU(),
        Dense(outputs, weight_init=Normal(1 / 192)),
    ]
    return Network(input_shape, layers, name="cifar")


KINDS: dict[str, type[Loss]] = {
    "mlp": MeanSquaredError,
    "classifier": SoftmaxCrossEntropy,
    "multilabel": SigmoidBinaryCrossEntropy,
}
"""Losses of perceptrons by the first word of their names."""


def perceptron(hidden: Sequence[int], kind: str = "mlp") -> Entry:
    """Return perceptrons with hidden layers of these widths, by default for 50 inputs."""
    layers = f"{len(hidden)} hidden layer{'s' if len(hidden) > 1 else ''}"
    family = partial(_perceptron, kind, tuple(hidden))
    outputs = 1 if kind == "mlp" else 2
    return Entry(f"perceptron, {layers}", family, (50,), outputs, VALUES)


def _perceptron(kind: str, hidden: Sequence[int], input_shape: Shape, outputs: int) -> Network:
    name = "-".join([kind, *map(str, hidden)])
    return Network(input_shape, dense_layers([*hidden, outputs]), KINDS[kind](), name)


def _perceptrons() -> dict[str, Entry]:
    """Return 30 perceptrons: one to three hidden layers of width 50·2ⁱ, 25·2ⁱ, 13·2ⁱ, i = 0 … 9."""
    entries = {}
    for depth in (1, 2, 3):
        for i in range(10):
            hidden = [width * 2**i for width in (50, 25, 13)[:depth]]
            entries["-".join(["mlp", *map(str, hidden)])] = perceptron(hidden)
    return entries


def _model(
    description: str,
    name: str,
    size: int,
    filters: Sequence[int],
    units: Sequence[int],
    loss: type[Loss] = SoftmaxCrossEntropy,
    outputs: int = 10,
    recipe: Recipe = IMAGES,
) -> dict[str, Entry]:
    family = partial(_convolutional, name, filters, units, loss)
    return {name: Entry(description, family, (3, size, size), outputs, recipe)}


NETWORKS = {
    **_model("3×32×32, two convolutions", "model0", 32, (16, 32), (100,)),
    **_model(
        "3×32×32, several labels of an image", "model0-labels", 32, (16, 32), (100,),
        SigmoidBinaryCrossEntropy, 2, replace(IMAGES, data=None, validation=None),
    ),
    **_model(
        "3×32×32, values of an image", "model0-values", 32, (16, 32), (100,),
        MeanSquaredError, 1, replace(VALUES, epochs=12, data=None),
    ),
    **_model("3×40×40, two convolutions", "model1", 40, (16, 32), (100,)),
    **_model("3×40×40, three convolutions", "model2", 40, (16, 32, 32), (128, 50)),
    **_model("3×12×12, two convolutions", "study-a-smaller", 12, (16, 32), (100,)),
    **_model("3×50×50, three convolutions", "study-a-larger", 50, (32, 32, 32), (200, 50)),
    **_model("3×16×16, two convolutions", "model-small", 16, (8, 16), (50,)),
    **_model("3×64×64, three convolutions", "model-large", 64, (32, 64, 64), (256, 100)),
    "cifar": Entry(
        "3×24×24, two wide convolutions",
        _cifar,
        (3, 24, 24),
        10,
        replace(IMAGES, learning_rate=0.01),
    ),
    # At 1e-3, Adam makes the last unit negative for every map within ten steps, and it stays so.
    "solar": Entry(
        "1×50×50 map to one value",
        _solar,
        (1, 50, 50),
        1,
        replace(VALUES, learning_rate=1e-4, epochs=3),
    ),
}  # fmt: skip

PERCEPTRONS = _perceptrons()
