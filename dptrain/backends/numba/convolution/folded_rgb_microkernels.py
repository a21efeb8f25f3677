"""A row of pooled 3 × 3 convolutions of RGB images with 8 filters, in registers.

A filter row has nine adjacent elements (pixel, channel). They are processed in pairs that begin at
elements 0, 2, 4, 6 and 7. A multiply-add takes both elements of a pair, each for 8 filters: lane
``2 k + s`` of a vector belongs to filter k and element s of the pair. The first weight of the last
pair is 0, since the pair before has its element.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from llvmlite import ir

from dptrain.backends.numba.pooling.pooling_windows import NO_GRADIENT, positive_maximum
from dptrain.backends.numba.vector import F32, F32P, F64, I8, I8P, I32, I64, Writer, as_intrinsic

SIDE, CHANNELS, WINDOW = 3, 3, 2
"""Rows and columns of a filter, channels of a pixel, and rows and columns of a window."""
ROW = SIDE * CHANNELS
ELEMENTS = (0, 2, 4, 6, 7)
"""First element of each pair of a filter row; the last pair overlaps the one before it."""
PAIRS = len(ELEMENTS)
FILTERS, LANES = 8, 16
WINDOWS = 4
"""Windows of a register tile, which has four sums of each: the smallest number of a row."""

Vectors = Sequence[ir.Value]


class _FoldedRow(Writer):
    """Base class of functions that process a row of windows.

    `x` points to the padded pixels of the first window, `folded` to the weights and then the bias.
    """

    arguments: ClassVar[Mapping[str, ir.Type]] = {
        "x": F32P,
        "row": I64,
        "folded": F32P,
        "values": F32P,
        "positions": I8P,
        "windows": I64,
    }

    def __init__(self, module: ir.Module) -> None:
        name = f"dptrain_{type(self).__name__.strip('_').lower()}"
        super().__init__(module, name, self.arguments, LANES)

    def folded(self, pair: int) -> ir.Value:
        """Return the address of the weights of a pair, counted over all filter rows."""
        return self.at(self.args["folded"], I64(pair * LANES))

    def rows(self, window: ir.Value) -> Vectors:
        """Return the addresses of the four rows of pixels of a window."""
        b, args = self.builder, self.args
        first = self.at(args["x"], b.mul(window, I64(WINDOW * CHANNELS)))
        return [self.at(first, b.mul(args["row"], I64(i))) for i in range(WINDOW + SIDE - 1)]

    def pair(self, address: ir.Value) -> ir.Value:
        """Load two elements and repeat them for all filters."""
        b, kind = self.builder, ir.VectorType(F64, FILTERS)
        both = b.load(b.bitcast(address, F64.as_pointer()), align=4)
        first = b.insert_element(ir.Constant(kind, ir.Undefined), both, I32(0))
        return b.bitcast(self.shuffle(first, first, [0] * FILTERS), self.vector)

    def shuffle(self, x: ir.Value, y: ir.Value, lanes: Sequence[int]) -> ir.Value:
        """Return lanes of x and, from its number of lanes on, of y."""
        order = ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes))
        return self.builder.shuffle_vector(x, y, order)

    def position(self, number: int) -> ir.Value:
        """Return a position in a window for each lane."""
        return ir.Constant(ir.VectorType(I8, LANES), [number] * LANES)


class _FoldedConvolution(_FoldedRow):
    """Computes the positive maxima of windows and their positions."""

    def write(self) -> None:
        b, args = self.builder, self.args
        last = b.sub(args["windows"], I64(WINDOWS))

        def tile(p: ir.Value, _: Vectors) -> Vectors:
            # The last tile overlaps the one before it, so that all of its windows exist.
            p = b.select(b.icmp_signed("<", p, last), p, last)
            self._store(p, self._sums(self.rows(p)))
            return []

        self.loop(I64(0), args["windows"], [], tile, step=WINDOWS)

    def _sums(self, rows: Vectors) -> list[list[ir.Value]]:
        """Return the sums of each row of pixels, with two elements of each filter row."""
        columns = range(WINDOW * WINDOWS)
        bias = self.load(self.folded(SIDE * PAIRS))
        sums = [[bias for _ in columns] for _ in range(WINDOW)]
        for row, address in enumerate(rows):
            pixels = [i for i in range(WINDOW) if 0 <= row - i < SIDE]
            weights = {
                i: [self.load(self.folded((row - i) * PAIRS + p)) for p in range(PAIRS)]
                for i in pixels
            }
            # Each pair of elements is loaded once for all pixels.
            for element in range(CHANNELS * columns.stop + ROW - CHANNELS - 1):
                found = [(j, element - CHANNELS * j) for j in columns]
                found = [(j, ELEMENTS.index(e)) for j, e in found if e in ELEMENTS]
                if not found:
                    continue
                elements = self.pair(self.at(address, I64(element)))
                for j, p in found:
                    for i in pixels:
                        sums[i][j] = self.multiply_add(elements, weights[i][p], sums[i][j])
        return sums

    def _store(self, p: ir.Value, sums: list[list[ir.Value]]) -> None:
        """Store windows, of which two fill a vector."""
        b = self.builder
        for first in range(0, WINDOWS, 2):
            pixels = []
            for row in sums:
                for j in range(WINDOW):
                    pair = row[WINDOW * first + j], row[WINDOW * (first + 1) + j]
                    parts = (self.shuffle(*pair, range(s, 2 * LANES, 2)) for s in range(2))
                    pixels.append(b.fadd(*parts))
            value, position = positive_maximum(self, pixels, I8)
            offset = b.mul(b.add(p, I64(first)), I64(FILTERS))
            self.store(value, self.at(self.args["values"], offset))
            self.store(position, self.at(self.args["positions"], offset))


class _FoldedGradients(_FoldedRow):
    """Adds the gradients of folded weights, and of the bias, to `folded`."""

    def write(self) -> None:
        b, args, count = self.builder, self.args, SIDE * PAIRS

        def window(q: ir.Value, state: Vectors) -> Vectors:
            *sums, total = state
            offset, rows = b.mul(q, I64(FILTERS)), self.rows(q)
            gradient = self._load_twice(self.at(args["values"], offset), F32)
            position = self._load_twice(self.at(args["positions"], offset), I8)
            exists = b.icmp_unsigned("!=", position, self.position(NO_GRADIENT))
            total = b.select(exists, b.fadd(total, gradient), total)
            for pixel in range(WINDOW * WINDOW):
                i, j = divmod(pixel, WINDOW)
                here = b.icmp_unsigned("==", position, self.position(pixel))
                dz = b.select(here, gradient, self.zero)
                for index in range(count):
                    r, p = divmod(index, PAIRS)
                    elements = self.pair(self.at(rows[i + r], I64(CHANNELS * j + ELEMENTS[p])))
                    sums[index] = self.multiply_add(elements, dz, sums[index])
            return [*sums, total]

        targets = [self.folded(index) for index in range(count + 1)]
        state = self.loop(I64(0), args["windows"], [self.load(t) for t in targets], window)
        for total, target in zip(state, targets, strict=True):
            self.store(total, target)

    def _load_twice(self, address: ir.Value, kind: ir.Type) -> ir.Value:
        """Load an element of each filter and repeat each for both lanes of the filter."""
        b, pointer = self.builder, ir.VectorType(kind, FILTERS).as_pointer()
        lanes = b.load(b.bitcast(address, pointer), align=4 if kind is F32 else 1)
        return self.shuffle(lanes, lanes, [lane // 2 for lane in range(LANES)])


def _row_of_windows(writer: type[_FoldedRow]) -> Any:
    """Return the function that calls the code of a row of windows."""

    def emit(builder: ir.IRBuilder, flat: list[ir.Value]) -> None:
        builder.call(writer(builder.module).function, flat)

    return as_intrinsic(writer.arguments, emit)


multiply_folded = _row_of_windows(_FoldedConvolution)
"""Compute convolution, ReLU and max pooling of a row of windows, at least `WINDOWS`.

Arguments: (x, start, row, folded, start, y, start, argmax, start, windows), of which

- x are padded pixels from the first window on, with rows of `row` elements,
- folded are the folded weights (15, 16), and the bias in every second element of the next 16,
- y, argmax are the results of the first window.
"""

add_folded_gradients = _row_of_windows(_FoldedGradients)
"""Add the gradients of folded weights (15, 16) and of the bias, from element 240 on, for a row of
windows. The arguments are those of `multiply_folded`, with dy instead of y.
"""
