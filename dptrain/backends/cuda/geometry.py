"""Arguments and macros that describe a convolution or pooling; see ``headers/geometry.cuh``."""

from __future__ import annotations

import numpy as np

from dptrain.backends.cuda.device.device import Device
from dptrain.network.layers import Conv2d, Pool2d
from dptrain.network.network import Node

GEOMETRY_MACROS = tuple(
    f"FIXED_{name}"
    for name in (
        "HEIGHT", "WIDTH", "CHANNELS", "OUT_HEIGHT", "OUT_WIDTH", "FILTERS", "R", "S",
        "STRIDE_H", "STRIDE_W", "PAD_TOP", "PAD_LEFT", "DILATION_H", "DILATION_W",
    )
)  # fmt: skip
"""Macros that replace the arguments of `geometry`, in the same order."""


def geometry(node: Node, layer: Conv2d | Pool2d, window: tuple[int, int]) -> list[np.int32]:
    """Return input (H, W, C), output (H, W, C), window, strides, padding (top, left), dilations."""
    (c, h, w), (k, ho, wo) = node.input_shape, node.output_shape
    (top, _), (left, _) = layer.pads(node.input_shape)
    dilations = layer.dilations if isinstance(layer, Conv2d) else (1, 1)
    numbers = (h, w, c, ho, wo, k, *window, *layer.strides, top, left, *dilations)
    return [np.int32(number) for number in numbers]


def geometry_defines(device: Device, numbers: list[np.int32]) -> dict[str, int]:
    """Return macros that compile a kernel for one geometry, if the device specializes kernels."""
    if not device.specializes:
        return {}
    return {name: int(number) for name, number in zip(GEOMETRY_MACROS, numbers, strict=True)}
