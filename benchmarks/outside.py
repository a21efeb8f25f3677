"""Networks outside the benchmark set, so that no kernel is fitted only to the set."""

from __future__ import annotations

from pathlib import Path

from dptrain.network import Network

FOLDER = Path(__file__).with_name("networks")
"""Folder of their files."""

OUTSIDE = ("lenet5", "vgg", "strided", "odd", "input113")
"""LeNet-5 (LeCun et al., "Gradient-based learning applied to document recognition", 1998) with ReLU
and maximum pooling, as it is written today; a small VGG; filters of 7×7, 4×4 and 1×1 with strides;
20, 44 and 60 filters of 5×5, 4×4 and 3×3; a large input."""
PERCEPTRON = "perceptron"
"""784-2048-2048-10, for GPUs; its products have 1.6 and 4.2 million weights."""


def find_network(name: str) -> Network:
    """Return one of `OUTSIDE`, `PERCEPTRON`, or a network that dptrain knows by name."""
    from dptrain.network.files import get_network

    return get_network(str(FOLDER / f"{name}.toml") if name in (*OUTSIDE, PERCEPTRON) else name)
