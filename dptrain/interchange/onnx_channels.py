"""Layers of the channels of maps that ONNX operators are: parts, permutations, factors.

A tensor that a transposition made has its channels on the last axis. It stands for the same maps,
until another transposition moves the channels back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx
from onnx import helper

from dptrain.errors import UserError
from dptrain.interchange.onnx_constants import FREE_BATCH
from dptrain.interchange.onnx_matching import Arrays, Match, always, constants
from dptrain.interchange.onnx_reading import PART, TO_FIRST, TO_LAST, ReadGraph, attributes
from dptrain.interchange.onnx_resampling import WHOLE
from dptrain.network.combining import Concatenate
from dptrain.network.layers import Conv2d, Layer, Shape
from dptrain.network.maps.channels import ChannelShuffle, ChannelSlice

BLOCK_FIRST, CHANNEL_FIRST = [0, 3, 5, 1, 2, 4], [0, 1, 3, 5, 2, 4]
"""Orders of axes (N, C, H, block, W, block) that move pixels of blocks to the channels."""


def read_transpose(graph: ReadGraph, node: onnx.NodeProto) -> Match | None:
    """Match a transposition that moves the channels to the last axis, or back."""
    order = list(attributes(node).get("perm", ()))
    is_last = graph.is_channels_last(node.input[0])
    return (
        Match((node.input[0],), always()) if order == (TO_FIRST if is_last else TO_LAST) else None
    )


def require_channels(graph: ReadGraph, tensor: str, axis: int) -> None:
    """Raise a `UserError` unless an axis of maps is that of the channels."""
    if graph.axis(tensor, axis) != 1:
        raise UserError(f"axis is {axis}; expected {graph.channel_axis(tensor)}, the channels")


def read_split(graph: ReadGraph, node: onnx.NodeProto) -> Match:
    """Match one output of a split along the channels.

    The attribute `PART` is its number and the number of all.
    """
    values, x = attributes(node), node.input[0]
    require_channels(graph, x, values.get("axis", 0))
    sizes = graph.constant(node.input[1]) if len(node.input) > 1 and node.input[1] else None
    listed = values.get("split") if sizes is None else sizes.reshape(-1)
    number, count = values[PART]

    def make(shape: Shape) -> tuple[Layer, ...]:
        # Equal parts, the last of which may be smaller.
        equal = [-(-shape[0] // count)] * count
        parts = equal if listed is None else [int(size) for size in listed]
        start = sum(parts[:number])
        return _slice(shape, start, start + parts[number])

    return Match((x,), make)


def _slice(shape: Shape, start: int, stop: int) -> tuple[Layer, ...]:
    """Return the layer that selects channels, or none if it selects all."""
    stop = min(stop, shape[0])
    return () if (start, stop) == (0, shape[0]) else (ChannelSlice(start, stop),)


def read_shuffle(graph: ReadGraph, node: onnx.NodeProto) -> Match | None:
    """Match Reshape to groups of channels, Transpose and Reshape."""
    turn = graph.node(node.input[0], "Transpose")
    first = None if turn is None else graph.node(turn.input[0], "Reshape")
    if turn is None or first is None or attributes(turn).get("perm") != [0, 2, 1, 3, 4]:
        return None
    targets = [graph.constant(each.input[1]) for each in (first, node)]
    if targets[0] is None or targets[1] is None:
        raise UserError("its new shape is computed from more than shapes; expected constants")
    groups, maps = (
        [int(size) for size in target.reshape(-1)] for target in targets if target is not None
    )

    def make(shape: Shape) -> tuple[Layer, ...]:
        channels, *sizes = shape
        count = groups[1] if len(groups) == 5 else 0
        wanted = [count, channels // max(count, 1), *sizes]
        if not (_is_reshape(groups, wanted) and _is_reshape(maps, [channels, *sizes])):
            raise UserError(
                f"the new shapes are {groups} and {maps}; expected groups of channels of "
                f"{channels}×{sizes[0]}×{sizes[1]} that become channels again"
            )
        return (ChannelShuffle(count),)

    return Match((first.input[0],), make)


def read_space_to_depth(graph: ReadGraph, node: onnx.NodeProto) -> Match:
    """Match SpaceToDepth."""
    block = int(attributes(node)["blocksize"])
    return Match(_phases(graph, node, node.input[0], block), always(Concatenate(block * block)))


def read_blocks(graph: ReadGraph, node: onnx.NodeProto) -> Match | None:
    """Match Reshape, Transpose and Reshape that make channels of the pixels of square blocks.

    The channels of the input, or the positions in the block, are the inner axis.
    """
    turn = graph.node(node.input[0], "Transpose")
    first = None if turn is None else graph.node(turn.input[0], "Reshape")
    if turn is None or first is None:
        return None
    order = list(attributes(turn).get("perm", ()))
    parts, maps = (graph.constant(each.input[1]) for each in (first, node))
    if order not in (BLOCK_FIRST, CHANNEL_FIRST) or parts is None or maps is None:
        return None
    split, joined = ([int(size) for size in target.reshape(-1)] for target in (parts, maps))
    block = split[3]
    if block < 2 or split[5] != block:
        return None
    layers: list[Layer] = [Concatenate(block * block)]
    if order == CHANNEL_FIRST:
        layers.append(ChannelShuffle(block * block))

    def make(shape: Shape) -> tuple[Layer, ...]:
        channels, height, width = shape
        wanted = [channels, height, block, width, block], [channels * block**2, height, width]
        if not (_is_reshape(split, wanted[0]) and _is_reshape(joined, wanted[1])):
            raise UserError(
                f"the new shapes are {split} and {joined}; expected blocks of {block}×{block} "
                f"pixels of {channels} channels that become {wanted[1][0]} channels"
            )
        return tuple(layers)

    return Match(_phases(graph, node, first.input[0], block), make)


def _phases(graph: ReadGraph, node: onnx.NodeProto, x: str, block: int) -> tuple[str, ...]:
    """Return slices of maps, one for each position in a block of pixels, row by row."""
    # Maps whose sizes are no multiples have slices of several sizes, which cannot be concatenated.
    return tuple(
        graph.insert(
            helper.make_node(
                "Slice", [x], [f"{node.output[0]}:{row},{column}"], node.name,
                starts=[row, column], ends=[WHOLE, WHOLE], axes=[2, 3], steps=[block, block],
            )
        )
        for row in range(block)
        for column in range(block)
    )  # fmt: skip


def _is_reshape(target: Sequence[int], sizes: Sequence[int]) -> bool:
    """Return whether the shape of a Reshape keeps samples apart and divides each into `sizes`."""
    if len(target) != len(sizes) + 1 or list(target).count(-1) > 1:
        return False
    batch, *rest = target
    size = math.prod(sizes)
    known = math.prod(value for value in rest if value > 0)
    found = [size // known if value == -1 and known else value for value in rest]
    return batch in (0, -1, FREE_BATCH) and found == list(sizes)


def read_scale(graph: ReadGraph, node: onnx.NodeProto) -> Match | None:
    """Match a product with a number for each channel: a convolution with one channel per group."""
    return _scaled(graph, node, {})


def read_scale_and_shift(graph: ReadGraph, node: onnx.NodeProto) -> Match | None:
    """Match `read_scale`, and a sum with a number for each channel."""
    for product, shift in (tuple(node.input), tuple(reversed(node.input))):
        before = graph.node(product, "Mul")
        if before is None or graph.num_readers(product) != 1 or not graph.is_constant(shift):
            continue
        channels = _by_channel(graph, shift, product)
        if channels is not None:
            return _scaled(graph, before, {"bias": channels})
    return None


def _scaled(graph: ReadGraph, node: onnx.NodeProto, bias: Arrays) -> Match | None:
    for x, factor in (tuple(node.input), tuple(reversed(node.input))):
        if graph.is_constant(x) or not graph.is_constant(factor):
            continue
        weight = _by_channel(graph, factor, x)
        if weight is None:
            continue
        count = len(weight)
        if any(len(values) != count for values in bias.values()):
            return None
        layer = Conv2d(count, 1, groups=count, bias=bool(bias))
        arrays = {"weight": weight.reshape(count, 1, 1, 1), **bias}
        return Match((x,), always(layer), arrays, graph.source(factor))
    return None


def _by_channel(graph: ReadGraph, name: str, x: str) -> np.ndarray | None:
    """Return a constant as (C,) if it has a number for each channel of maps."""
    values = constants(graph, [name], ("factor",))["factor"]
    axis = graph.channel_axis(x) - 4
    shape = (1,) * (4 - values.ndim) + values.shape
    if values.size < 2 or len(shape) != 4 or shape[axis] != values.size:
        return None
    return np.ascontiguousarray(values.reshape(-1))
