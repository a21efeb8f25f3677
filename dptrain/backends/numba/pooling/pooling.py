"""Pooling kernels over maps (N, H, W, C); items are rows of the maps that a kernel writes.

Positions of a window outside the map do not count. The inner loops run over channels, which are
adjacent in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from dptrain.backends.numba.vector import F32P, I32, I64, Writer, as_intrinsic, compiled_registers
from dptrain.native.jit import Items, inlined, kernel

Array = NDArray[Any]


class _Grid(Writer):
    """Computes consecutive output elements, each from a grid of input elements.

    Forward the outputs are windows and the inputs are their pixels; backward the outputs are pixels
    and the inputs are the windows that contain them. Input (i, j) of output p and channel q is at
    ``p · input_stride + i · row + j · channels + q`` in the arrays `inputs`, and the output is at
    ``p · output_stride + q`` in the arrays `outputs`. The number of the pixel in its window is
    ``position + i · down + j · across``.

    Args:
        size: height and width of the grid; None for a size that is passed at run time.
    """

    name: ClassVar[str]
    outputs: ClassVar[tuple[str, ...]]
    inputs: ClassVar[tuple[str, ...]]

    def __init__(self, module: ir.Module, width: int, size: tuple[int, int] | None) -> None:
        self.size = size
        suffix = "" if size is None else f"_{size[0]}x{size[1]}"
        arguments = {
            **dict.fromkeys((*self.outputs, *self.inputs), F32P),
            **dict.fromkeys(_SHAPE, I64),
        }
        super().__init__(module, f"dptrain_pool_{self.name}{suffix}_x{width}", arguments, width)

    def write(self) -> None:
        b, args = self.builder, self.args
        rest = b.srem(args["channels"], I64(self.width))
        whole = b.sub(args["channels"], rest)
        self.mask_after(rest)
        height, width = self.size or (0, 0)
        self.known = [self.cell(I64(i), I64(j)) for i in range(height) for j in range(width)]

        def element(p: ir.Value, _: Any) -> list[ir.Value]:
            output, input_ = b.mul(p, args["output_stride"]), b.mul(p, args["input_stride"])

            def vector(q: ir.Value, _: Any) -> list[ir.Value]:
                self.compute(b.add(output, q), b.add(input_, q), masked=False)
                return []

            self.loop(I64(0), whole, [], vector, step=self.width)
            with b.if_then(b.icmp_signed("!=", rest, I64(0)), likely=False):
                self.compute(b.add(output, whole), b.add(input_, whole), masked=True)
            return []

        self.loop(I64(0), args["count"], [], element)

    def compute(self, output: ir.Value, input_: ir.Value, masked: bool) -> None:
        """Compute one output element for a vector of channels, from offsets of output and input."""
        raise NotImplementedError

    def cell(self, i: ir.Value, j: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Return the offset and the position of a grid element."""
        b, args = self.builder, self.args
        offset = b.add(b.mul(i, args["row"]), b.mul(j, args["channels"]))
        position = b.add(b.mul(i, args["down"]), b.mul(j, args["across"]))
        return offset, self.splat(b.trunc(b.add(args["position"], position), I32))

    def cells(self, state: Sequence[ir.Value], body: Any) -> Sequence[ir.Value]:
        """Run ``body(offset, position, state)`` over the grid."""
        if self.size is not None:
            for offset, position in self.known:
                state = body(offset, position, state)
            return state

        def row(i: ir.Value, state: Sequence[ir.Value]) -> Sequence[ir.Value]:
            def column(j: ir.Value, state: Sequence[ir.Value]) -> Sequence[ir.Value]:
                result: Sequence[ir.Value] = body(*self.cell(i, j), state)
                return result

            return self.loop(I64(0), self.args["columns"], state, column)

        return self.loop(I64(0), self.args["rows"], state, row)


class _Largest(_Grid):
    """Stores the largest pixel of a window, and its position."""

    name, outputs, inputs = "largest", ("y", "argmax"), ("x",)

    def compute(self, output: ir.Value, input_: ir.Value, masked: bool) -> None:
        b, args = self.builder, self.args

        def compare(offset: ir.Value, position: ir.Value, state: Any) -> Sequence[ir.Value]:
            best, where = state
            value = self.load(self.at(args["x"], b.add(input_, offset)), masked=masked)
            # A NaN is larger than any number, and is kept.
            number = b.fcmp_ordered("ord", best, best)
            better = b.and_(number, b.fcmp_unordered(">", value, best))
            return [b.select(better, value, best), b.select(better, position, where)]

        first = self.load(self.at(args["x"], input_), masked=masked)
        best, where = self.cells([first, self.cell(I64(0), I64(0))[1]], compare)
        self.store(best, self.at(args["y"], output), masked)
        self.store(b.bitcast(where, self.vector), self.at(args["argmax"], output), masked)


class _Gather(_Grid):
    """Sums the gradients of the windows whose maximum is the pixel."""

    name, outputs, inputs = "gather", ("dx",), ("dy", "argmax")

    def compute(self, output: ir.Value, input_: ir.Value, masked: bool) -> None:
        b, args = self.builder, self.args

        def add(offset: ir.Value, position: ir.Value, state: Any) -> Sequence[ir.Value]:
            window = b.add(input_, offset)
            where = self.load(self.at(args["argmax"], window), masked=masked)
            here = b.icmp_signed("==", b.bitcast(where, position.type), position)
            gradient = self.load(self.at(args["dy"], window), masked=masked)
            return [b.fadd(state[0], b.select(here, gradient, self.zero))]

        (total,) = self.cells([self.zero], add)
        self.store(total, self.at(args["dx"], output), masked)


_SHAPE = (
    "rows",
    "columns",
    "position",
    "down",
    "across",
    "row",
    "channels",
    "count",
    "output_stride",
    "input_stride",
)


def _grid(writer: type[_Grid], sizes: Sequence[tuple[int, int]]) -> Any:
    """Return the function that calls the unrolled code for a grid of one of `sizes`, or any."""
    pointers = (*writer.outputs, *writer.inputs)

    def emit(builder: ir.IRBuilder, flat: list[ir.Value]) -> None:
        args = [builder.bitcast(pointer, F32P) for pointer in flat[: len(pointers)]]
        args += flat[len(pointers) :]
        rows, columns = flat[len(pointers) : len(pointers) + 2]
        width = compiled_registers().width

        def choose(sizes: Sequence[tuple[int, int]]) -> None:
            if not sizes:
                builder.call(writer(builder.module, width, None).function, args)
                return
            fits = [
                builder.icmp_signed("==", n, I64(m))
                for n, m in zip((rows, columns), sizes[0], strict=True)
            ]
            with builder.if_else(builder.and_(*fits)) as (then, otherwise):
                with then:
                    builder.call(writer(builder.module, width, sizes[0]).function, args)
                with otherwise:
                    choose(sizes[1:])

        choose(sizes)

    return as_intrinsic({**dict.fromkeys(pointers, F32P), **dict.fromkeys(_SHAPE, I64)}, emit)


_largest = _grid(_Largest, ((3, 3), (2, 2), (2, 3), (3, 2)))
"""Store the largest elements of consecutive windows and their positions."""

_gather = _grid(_Gather, ((1, 1), (1, 2), (2, 1), (2, 2)))
"""Store the gradients of pixels that are in the same number of windows."""


@kernel
def max_forward(items: Items, x: Array, y: Array, pool: Any) -> None:
    """Store the maximum of each window in y and its position in `pool.argmax` (int32); of equal
    elements, the first one.
    """
    top, left, vertical, horizontal, window_v, window_h, height, width, _ = pool
    channels, h_pool, w_pool = x.shape[3], y.shape[1], y.shape[2]
    x_flat, y_flat, argmax = x.reshape(-1), y.reshape(-1), pool.argmax
    for item in range(items.start, items.stop):
        n, i = item // h_pool, item % h_pool
        above, j = i * vertical - top, 0
        first, last = max(0, -above), min(window_v, height - above)
        while j < w_pool:
            before, count = j * horizontal - left, 1
            begin, end = max(0, -before), min(window_h, width - before)
            if begin == 0 and end == window_h:
                # Process all windows up to the last complete one together.
                count = min(w_pool, (width - window_h + left) // horizontal + 1) - j
            at = ((n * h_pool + i) * w_pool + j) * channels
            corner = ((n * height + above + first) * width + before + begin) * channels
            _largest(
                *(y_flat, at, argmax, at, x_flat, corner),
                *(last - first, end - begin, first * window_h + begin, window_h, 1),
                *(width * channels, channels, count, channels, horizontal * channels),
            )
            j += count


@kernel
def max_backward(items: Items, dy: Array, dx: Array, pool: Any) -> None:
    """dx = sum of dy over the windows whose argmax is the element."""
    top, left, vertical, horizontal, window_v, window_h, height, width, _ = pool
    channels, h_pool, w_pool = dx.shape[3], dy.shape[1], dy.shape[2]
    dx_flat, dy_flat, argmax = dx.reshape(-1), dy.reshape(-1), pool.argmax
    for item in range(items.start, items.stop):
        n, row = item // height, item % height
        i = max(0, (row + top - window_v + vertical) // vertical)
        rows = min(h_pool - 1, (row + top) // vertical) - i + 1
        # Pixels with a distance of the stride have windows with the same offsets.
        for phase in range(min(horizontal, width)):
            column = phase
            while column < width:
                first = (column + left - window_h + horizontal) // horizontal
                last, j, count = (column + left) // horizontal, max(0, first), 1
                if first >= 0 and last < w_pool:
                    count += min((width - 1 - column) // horizontal, w_pool - 1 - last)
                at = ((n * h_pool + i) * w_pool + j) * channels
                position = (row + top - i * vertical) * window_h + column + left
                _gather(
                    *(dx_flat, ((n * height + row) * width + column) * channels),
                    *(dy_flat, at, argmax, at, rows, min(last, w_pool - 1) - j + 1),
                    *(position - j * horizontal, -vertical * window_h, -horizontal),
                    *(w_pool * channels, channels, count, horizontal * channels, channels),
                )
                column += count * horizontal


@inlined
def _weight(i: int, j: int, pool: Any, factor: float) -> Any:
    """Return the factor of a window's sum, which for 0 is 1 / (its elements inside the map)."""
    if factor > 0.0:
        return np.float32(factor)
    top, left, vertical, horizontal, window_v, window_h, height, width, _ = pool
    row, column = i * vertical - top, j * horizontal - left
    rows = min(row + window_v, height) - max(row, 0)
    columns = min(column + window_h, width) - max(column, 0)
    return np.float32(1.0) / np.float32(rows * columns)


@kernel
def sum_forward(items: Items, x: Array, y: Array, pool: Any, factor: float) -> None:
    """y = sum of each window times `_weight`."""
    top, left, vertical, horizontal, window_v, window_h, height, width, _ = pool
    channels = x.shape[3]
    for item in range(items.start, items.stop):
        n, i = item // y.shape[1], item % y.shape[1]
        for j in range(y.shape[2]):
            for c in range(channels):
                y[n, i, j, c] = 0.0
            for p in range(window_v * window_h):
                row = i * vertical + p // window_h - top
                column = j * horizontal + p % window_h - left
                if 0 <= row < height and 0 <= column < width:
                    for c in range(channels):
                        y[n, i, j, c] += x[n, row, column, c]
            weight = _weight(i, j, pool, factor)
            for c in range(channels):
                y[n, i, j, c] *= weight


@kernel
def sum_backward(items: Items, dy: Array, dx: Array, pool: Any, factor: float) -> None:
    """dx = sum of dy times `_weight` over the windows that contain an element."""
    top, left, vertical, horizontal, window_v, window_h, height, width, _ = pool
    channels = dx.shape[3]
    for item in range(items.start, items.stop):
        n, row = item // height, item % height
        for column in range(width):
            for c in range(channels):
                dx[n, row, column, c] = 0.0
        first = max(0, (row + top - window_v + vertical) // vertical)
        for i in range(first, min(dy.shape[1], (row + top) // vertical + 1)):
            for j in range(dy.shape[2]):
                weight = _weight(i, j, pool, factor)
                begin = j * horizontal - left
                for column in range(max(0, begin), min(width, begin + window_h)):
                    for c in range(channels):
                        dx[n, row, column, c] += weight * dy[n, i, j, c]
