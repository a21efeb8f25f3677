"""Networks outside the benchmark set, so that no kernel is fitted only to the set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from dptrain.network import Conv2d, Dense, Flatten, Layer, MaxPool2d, Network, ReLU


def _dense(*units: int) -> list[Layer]:
    layers: list[Layer] = [Flatten()]
    for i, count in enumerate(units):
        layers += [ReLU(), Dense(count)] if i else [Dense(count)]
    return layers


def _network(name: str, shape: tuple[int, int, int], *parts: Sequence[Layer]) -> Network:
    return Network(shape, [layer for part in parts for layer in part], name=name)


def _lenet5() -> Network:
    """Source: LeCun et al., "Gradient-based learning applied to document recognition", 1998.

    With ReLU and maximum pooling, as it is written today.
    """
    return _network(
        "lenet5", (1, 32, 32),
        [Conv2d(6, 5, padding="valid"), ReLU(), MaxPool2d(2)],
        [Conv2d(16, 5, padding="valid"), ReLU(), MaxPool2d(2)],
        _dense(120, 84, 10),
    )  # fmt: skip


def _vgg() -> Network:
    blocks: list[Layer] = []
    for filters in (64, 128, 256):
        blocks += [Conv2d(filters), ReLU(), Conv2d(filters), ReLU(), MaxPool2d(2)]
    return _network("vgg", (3, 32, 32), blocks, _dense(256, 10))


def _strided() -> Network:
    """7×7 with stride 2, 3×3, 4×4 with stride 2, 1×1."""
    return _network(
        "strided", (3, 64, 64),
        [Conv2d(32, 7, stride=2), ReLU(), Conv2d(64, 3), ReLU()],
        [Conv2d(64, 4, stride=2), ReLU(), Conv2d(128, 1), ReLU(), MaxPool2d(2)],
        _dense(10),
    )  # fmt: skip


def _odd() -> Network:
    """20, 44 and 60 filters, kernels of 4×4 and 5×5."""
    return _network(
        "odd", (3, 32, 32),
        [Conv2d(20, 5), ReLU(), MaxPool2d(2), Conv2d(44, 4), ReLU()],
        [Conv2d(60, 3), ReLU(), MaxPool2d(2)],
        _dense(90, 10),
    )  # fmt: skip


def _large_input() -> Network:
    return _network(
        "input113", (3, 113, 113),
        [Conv2d(16), ReLU(), MaxPool2d(2), Conv2d(32), ReLU(), MaxPool2d(2)],
        [Conv2d(32), ReLU(), MaxPool2d(2)],
        _dense(64, 10),
    )  # fmt: skip


OUTSIDE: Mapping[str, Network] = MappingProxyType({
    network.name: network for network in (_lenet5(), _vgg(), _strided(), _odd(), _large_input())
})  # fmt: skip


PERCEPTRON = _network("perceptron", (1, 28, 28), _dense(2048, 2048, 10))
"""784-2048-2048-10, for GPUs; its products have 1.6 and 4.2 million weights."""


def find_network(name: str) -> Network:
    """Return one of `OUTSIDE`, `PERCEPTRON`, or a network that dptrain knows by name."""
    if name in OUTSIDE:
        return OUTSIDE[name]
    if name == PERCEPTRON.name:
        return PERCEPTRON
    from dptrain.network.files import get_network

    return get_network(name)
