"""Describe a convolution to cuDNN as a graph of operations on tensors.

Dimensions are (N, C, H, W) for any memory layout; the strides define the layout. Activations are
stored as (N, H, W, C) and weights as (K, R, S, C), which tensor cores read without a conversion.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dptrain.network.layers import Conv2d
from dptrain.network.network import Node

FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = "forward", "backward_input", "backward_weight"

Dims = tuple[int, int, int, int]


@dataclass(frozen=True)
class Problem:
    """One convolution of a layer: the key by which engines are selected and cached.

    Attributes:
        kind: `FORWARD`, `BACKWARD_INPUT` or `BACKWARD_WEIGHT`.
        x, w, y: dimensions (N, C, H, W), (K, C, R, S) and (N, K, Ho, Wo).
        strides, dilations: vertical and horizontal.
        before, after: zero padding (top, left) and (bottom, right).
        bias: whether the forward convolution adds a bias.
        relu: whether ReLU is fused into the forward convolution.
        precision: ``fp32``, ``tf32`` or ``bf16``.
    """

    kind: str
    x: Dims
    w: Dims
    y: Dims
    strides: tuple[int, int]
    dilations: tuple[int, int]
    before: tuple[int, int]
    after: tuple[int, int]
    bias: bool
    relu: bool
    precision: str

    @property
    def dtype(self) -> str:
        """cuDNN's name of the dtype of all tensors. Sums are float32 in every precision."""
        return "BFLOAT16" if self.precision == "bf16" else "FLOAT"


def problem_of(node: Node, kind: str, samples: int, *, relu: bool, precision: str) -> Problem:
    """Return the convolution of a layer for a number of samples."""
    layer = node.layer_of(Conv2d)
    (c, h, w), (k, out_h, out_w) = node.input_maps, node.output_maps
    (top, bottom), (left, right) = layer.pads(node.input_shape)
    r, s = layer.window
    return Problem(
        kind,
        (samples, c, h, w),
        (k, c, r, s),
        (samples, k, out_h, out_w),
        layer.strides,
        layer.dilations,
        (top, left),
        (bottom, right),
        layer.bias and kind == FORWARD,
        relu and kind == FORWARD,
        precision,
    )


def channels_last(dims: Dims) -> Dims:
    """Return the strides of an (N, C, H, W) tensor that is stored as (N, H, W, C)."""
    _, c, h, w = dims
    return c * h * w, 1, c * w, c


def describe(cudnn: Any, problem: Problem, handle: Any) -> tuple[Any, tuple[Any, ...]]:
    """Build the graph of a convolution.

    Args:
        cudnn: the frontend module.
        problem: the convolution.
        handle: cuDNN handle that runs the graph.

    Returns:
        The graph, and its tensors: x, w, bias (if there is one), y; or dy, w, dx; or x, dy, dw.
    """
    number, full = getattr(cudnn.data_type, problem.dtype), cudnn.data_type.FLOAT
    graph = cudnn.pygraph(
        io_data_type=number, intermediate_data_type=full, compute_data_type=full, handle=handle
    )

    def tensor(name: str, dims: Dims) -> Any:
        return graph.tensor(
            dim=list(dims), stride=list(channels_last(dims)), data_type=number, name=name
        )

    geometry = {
        "pre_padding": list(problem.before),
        "post_padding": list(problem.after),
        "stride": list(problem.strides),
        "dilation": list(problem.dilations),
    }
    inputs: tuple[Any, ...]
    if problem.kind == FORWARD:
        inputs = tensor("x", problem.x), tensor("w", problem.w)
        result = graph.conv_fprop(*inputs, **geometry)
        if problem.bias:
            inputs = *inputs, tensor("bias", (1, problem.w[0], 1, 1))
            result = graph.bias(result, inputs[2])
        result, dims = graph.relu(result) if problem.relu else result, problem.y
    elif problem.kind == BACKWARD_INPUT:
        inputs = tensor("dy", problem.y), tensor("w", problem.w)
        result, dims = graph.conv_dgrad(*inputs, **geometry), problem.x
    else:
        inputs = tensor("x", problem.x), tensor("dy", problem.y)
        result, dims = graph.conv_wgrad(*inputs, **geometry), problem.w
    result.set_output(True).set_data_type(number)
    result.set_dim(list(dims)).set_stride(list(channels_last(dims)))
    return graph, (*inputs, result)
