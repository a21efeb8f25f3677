"""Tables of a grouped convolution: which elements of a filter meet which pixels of a padded map."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dptrain.backends.numba.convolution.grouped_convolution import GroupedGeometry

MOST_PIXELS = 192
"""Largest number of pixels of a product, unless a row has more."""


class AxisPhase(NamedTuple):
    """Results at equal distances along an axis, for which the same elements of a filter count.

    Attributes:
        first, step, number: positions of the results.
        source, source_step: position in the padded map for the first of `taps`, and its distance.
        taps, tap_step: elements of the filter, and the distance of their positions.
    """

    first: int
    step: int
    number: int
    source: int
    source_step: int
    taps: tuple[int, ...]
    tap_step: int


class Axis(NamedTuple):
    """An axis of a padded map: positions before the operand, their number, and the phases."""

    before: int
    size: int
    phases: tuple[AxisPhase, ...]


def forward_axis(pad: int, stride: int, dilation: int, window: int, out: int) -> Axis:
    """Return the axis of a forward pass with `out` results.

    Example:
        >>> forward_axis(1, 2, 1, 3, 4).size
        9
    """
    size = (out - 1) * stride + (window - 1) * dilation + 1
    return Axis(
        pad, size, (AxisPhase(0, 1, out, 0, stride, tuple(range(window)), dilation),)
    )  # fmt: skip


def backward_axis(pad: int, stride: int, dilation: int, window: int, size: int) -> Axis:
    """Return the axis of an input gradient with `size` results.

    Example:
        >>> [phase.taps for phase in backward_axis(1, 2, 1, 3, 8).phases]
        [(1,), (0, 2)]
    """
    found = []
    for first in range(min(stride, size)):
        taps = [t for t in range(window) if (first + pad - t * dilation) % stride == 0]
        sources = [(first + pad - t * dilation) // stride for t in taps]
        found.append((first, -(-(size - first) // stride), taps, sources or [0]))
    low = min(min(sources) for *_, sources in found)
    high = max(max(sources) + count for _, count, _, sources in found)
    phases = (
        AxisPhase(first, stride, count, sources[0] - low, 1, tuple(taps),
                  sources[1] - sources[0] if sources[1:] else 0)
        for first, count, taps, sources in found
    )  # fmt: skip
    return Axis(-low, high - low, tuple(phases))


class Sizes(NamedTuple):
    """Channels and filters of a group or of a block, their number, and the width of the result.

    Attributes:
        channels, filters, groups, depthwise: see `GroupedGeometry`.
        width, all_filters: pixels of a row of the result, and filters of all groups.
    """

    channels: int
    filters: int
    groups: int
    depthwise: bool
    width: int
    all_filters: int


def geometry_of(vertical: Axis, horizontal: Axis, sizes: Sizes) -> GroupedGeometry:
    """Return the tables of all phases of a product."""
    phases, tables = [], list[NDArray[np.int64]]()
    row = 0
    for down in vertical.phases:
        for across in horizontal.phases:
            phases.append(phase_row(down, across, horizontal.size, sizes, row, tables))
            inner = 1 if sizes.depthwise else sizes.channels
            row += len(down.taps) * len(across.taps) * inner
    return GroupedGeometry(
        vertical.before, horizontal.before, vertical.size, horizontal.size, sizes.channels,
        sizes.filters, sizes.groups, int(sizes.depthwise), np.array(phases, np.int64),
        np.concatenate(tables).astype(np.int32),
    )  # fmt: skip


def phase_row(
    down: AxisPhase,
    across: AxisPhase,
    padded_width: int,
    sizes: Sizes,
    row: int,
    tables: list[NDArray[np.int64]],
) -> Sequence[int]:
    """Return the numbers of a phase, and add its tables.

    Returns:
        Rows of results; rows of a product; pixels of a row; steps of the products; first element of
        the padded map, and elements between two products; the same for a sample of the result;
        first row of the weights; positions of four tables: pixels, elements of the filters,
        results, and rows of the weights, which are the results of a weight gradient.
    """
    pitch, line = sizes.channels, padded_width * sizes.channels
    chunk = max(1, min(down.number, MOST_PIXELS // across.number))
    pixels = _grid(
        np.arange(chunk) * down.source_step * line,
        np.arange(across.number) * across.source_step * pitch,
    )
    taps = _grid(
        np.arange(len(down.taps)) * down.tap_step * line,
        np.arange(len(across.taps)) * across.tap_step * pitch,
    )
    if not sizes.depthwise:
        taps = _grid(taps, np.arange(sizes.channels))
    below = down.step * sizes.width * sizes.all_filters
    results = _grid(
        np.arange(chunk) * below, np.arange(across.number) * across.step * sizes.all_filters
    )
    starts = []
    # A table of no elements is never read beyond its first entry.
    for table in (pixels, taps, results, np.arange(len(taps)) * sizes.all_filters):
        starts.append(sum(map(len, tables)))
        tables.append(table if len(table) else np.zeros(1, np.int64))
    first = (down.first * sizes.width + across.first) * sizes.all_filters
    return [
        down.number, chunk, across.number, len(taps), down.source * line + across.source * pitch,
        chunk * down.source_step * line, first, chunk * below, row, *starts,
    ]  # fmt: skip


def _grid(rows: NDArray[np.int64], columns: NDArray[np.int64]) -> NDArray[np.int64]:
    return (rows[:, None] + columns).reshape(-1)
