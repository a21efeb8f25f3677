"""Time single layers by PyTorch's calls of cuDNN, for the table of layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.clock import Program, take_turns, torch_timer
from benchmarks.gpu.peers.theirs import capture, set_arithmetic
from dptrain.network import Conv2d, MaxPool2d, Network, Node

aten = torch.ops.aten

TIMES, BLOCKS = 20, 5
"""Repetitions of a layer for each launch, and blocks of launches."""


class _Layer:
    """A convolution or max pooling layer with symmetric padding, and its data."""

    def __init__(self, node: Node, batch_size: int, number: Callable[..., Tensor]) -> None:
        layer: Any = node.layer
        (top, bottom), (left, right) = layer.pads(node.input_shape)
        assert (top, left) == (bottom, right), "PyTorch requires symmetric padding"
        self.pads, self.strides = [top, left], list(layer.strides)
        self.x = number(batch_size, *node.input_shape)
        self.dy = number(batch_size, *node.output_shape)


class _Convolution(_Layer):
    def __init__(self, node: Node, batch_size: int, number: Callable[..., Tensor]) -> None:
        super().__init__(node, batch_size, number)
        assert isinstance(node.layer, Conv2d)
        filters = node.layer.filters
        self.weight = number(filters, node.input_shape[0], *node.layer.window)
        self.bias = number(filters)
        self.dilations, self.first = list(node.layer.dilations), node.index == 0

    def forward(self) -> None:
        torch.conv2d(self.x, self.weight, self.bias, self.strides, self.pads, self.dilations)

    def backward(self) -> None:
        aten.convolution_backward(
            self.dy, self.x, self.weight, [len(self.bias)], self.strides, self.pads, self.dilations,
            False, [0, 0], 1, [not self.first, True, True],
        )  # fmt: skip


class _Pooling(_Layer):
    def __init__(self, node: Node, batch_size: int, number: Callable[..., Tensor]) -> None:
        super().__init__(node, batch_size, number)
        assert isinstance(node.layer, MaxPool2d)
        self.window = list(node.layer.windows)
        _, self.indices = self._pool()

    def _pool(self) -> tuple[Tensor, Tensor]:
        pooled: tuple[Tensor, Tensor] = aten.max_pool2d_with_indices(
            self.x, self.window, self.strides, self.pads
        )
        return pooled

    def forward(self) -> None:
        self._pool()

    def backward(self) -> None:
        aten.max_pool2d_with_indices_backward(
            self.dy, self.x, self.window, self.strides, self.pads, [1, 1], False, self.indices
        )


def torch_layer_times(
    network: Network, batch_size: int, precision: str
) -> dict[tuple[str, str], float]:
    """Return the time in µs by layer and direction, in the faster memory layout."""
    set_arithmetic(precision)
    torch.backends.cudnn.benchmark = True
    times: dict[tuple[str, str], float] = {}
    for layout in (torch.contiguous_format, torch.channels_last):
        number = partial(_number, precision=precision, layout=layout)
        for node in network.nodes:
            for direction, run in _calls(node, batch_size, number).items():
                key = node.name, direction
                times[key] = min(times.get(key, float("inf")), float(np.median(laps_us(run))))
    return times


def _calls(
    node: Node, batch_size: int, number: Callable[..., Tensor]
) -> dict[str, Callable[[], None]]:
    """Return functions that run a layer, by direction; empty for other kinds of layers."""
    layer: _Convolution | _Pooling
    if isinstance(node.layer, Conv2d):
        layer = _Convolution(node, batch_size, number)
    elif isinstance(node.layer, MaxPool2d):
        layer = _Pooling(node, batch_size, number)
    else:
        return {}
    return {"forward": layer.forward, "backward": layer.backward}


def _number(*shape: int, precision: str, layout: torch.memory_format) -> Tensor:
    tensor = torch.randn(*shape, device="cuda")
    tensor = tensor.bfloat16() if precision == "bf16" else tensor
    return tensor.contiguous(memory_format=layout) if len(shape) == 4 else tensor


def laps_us(run: Callable[[], object], times: int = TIMES) -> list[float]:
    """Return the time in µs of a run, one of `times` in a graph, for each of several blocks."""

    def repeated() -> None:
        for _ in range(times):
            run()

    program = Program(capture(repeated), torch_timer)
    return [1e3 * ms / times for ms in take_turns({"run": program}, BLOCKS)["run"].medians]
