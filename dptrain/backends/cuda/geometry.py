"""What kernels that read windows of maps are told of a layer; see ``kernels/geometry.cuh``."""

from __future__ import annotations

from typing import Any

import numpy as np

from dptrain.backends.cuda.device import Device
from dptrain.network.network import Node

FIXED = tuple(
    f"FIXED_{name}"
    for name in (
        "HEIGHT", "WIDTH", "CHANNELS", "OUT_HEIGHT", "OUT_WIDTH", "FILTERS", "R", "S",
        "STRIDE_H", "STRIDE_W", "PAD_TOP", "PAD_LEFT",
    )
)  # fmt: skip
"""Macros that stand for the numbers of `geometry`, in its order."""


def geometry(node: Node, window: tuple[int, int]) -> list[np.int32]:
    """Maps (H, W, C), output (H, W, C), window, strides and positions outside above and before."""
    layer: Any = node.layer
    (c, h, w), (k, ho, wo) = node.input_shape, node.output_shape
    (top, _), (left, _) = layer.pads(node.input_shape)
    numbers = (h, w, c, ho, wo, k, *window, *layer.strides, top, left)
    return [np.int32(number) for number in numbers]


def fixed(device: Device, numbers: list[np.int32]) -> dict[str, int]:
    """Macros that compile a kernel for one geometry, where that is worth a compilation."""
    if not device.specializes:
        return {}
    return {name: int(number) for name, number in zip(FIXED, numbers, strict=True)}
