"""F(4×4, 3×3) of colour images: three input channels, pooled by 2×2 windows in registers.

As in `winograd`, which says what A, B and G are, four rows and columns of outputs come from 36
products instead of 144. But three channels neither fill a vector nor make 36 matrix products worth
their loads and stores. So inputs are transformed with a few neighbouring tiles in one vector, a
pixel's three channels and one number that nobody reads in every four elements of it; and a product
goes from registers into half of the next transform:

    forward         (G w Gᵀ) ⊙ (Bᵀ x B)  →  Aᵀ ·  →  stored  →  · A, pooled, stored
    by the weights  dy, unpooled  →  · Aᵀ  →  stored  →  A ·  →  ⊙ (Bᵀ x B), added up

What is stored between is a *half*: 4 × 6 vectors of a tile, for one vector of filters. Memory:

- inputs (group of tiles, column of the 6 × 6, row, tile of the group, 4);
- halves (tile, column, row of the 4, filter of the vector);
- weights and sums (row, column, channel, K).

Every function processes one row of tiles of one sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from dptrain.backends.numba.pooling_windows import NO_GRADIENT
from dptrain.backends.numba.vector import (
    F32,
    F32P,
    I8,
    I8P,
    I32,
    I64,
    Writer,
    compiled_registers,
    flatten_arguments,
)
from dptrain.backends.numba.winograd_transforms import (
    MATRICES,
    SIDE,
    gradient_transform,
    input_transform,
    output_transform,
)

CHANNELS = 3
LANES = 4
"""Elements of a vector that a tile takes."""
WINDOW = 2
"""Height and width of the windows."""
HALF = SIDE * (SIDE + 2)
"""Vectors of a half."""

Vectors = Sequence[ir.Value]


class _Colour(Writer):
    """What the writers here have in common: each has its name, and a list of arguments."""

    ARGUMENTS: ClassVar[Mapping[str, ir.Type]]

    def __init__(self, module: ir.Module, width: int) -> None:
        name = f"dptrain_colour_{type(self).__name__.strip('_').lower()}_x{width}"
        super().__init__(module, name, self.ARGUMENTS, width)


class _Inputs(_Colour):
    """Bᵀ x B of a row of tiles.

    `mixed` takes Bᵀ x, six rows `pitch` apart, of which pitch elements are computed.
    """

    ARGUMENTS = {  # noqa: RUF012
        "x": F32P,
        "row": I64,
        "mixed": F32P,
        "pitch": I64,
        "v": F32P,
        "tiles": I64,
    }

    def write(self) -> None:
        b, args, size = self.builder, self.args, SIDE + 2
        group = self.width // LANES

        def down(q: ir.Value, _: Vectors) -> Vectors:
            x, mixed = self.at(args["x"], q), self.at(args["mixed"], q)
            column = [self.load(self.at(x, b.mul(I64(i), args["row"]))) for i in range(size)]
            for i, value in enumerate(input_transform(self, column)):
                self.store(value, self.at(mixed, b.mul(I64(i), args["pitch"])))
            return []

        def across(i: ir.Value, _: Vectors) -> Vectors:
            row, place = self.at(args["mixed"], b.mul(i, args["pitch"])), b.mul(i, I64(self.width))

            def some(t: ir.Value, _: Vectors) -> Vectors:
                start = self.at(row, b.mul(t, I64(SIDE * CHANNELS)))
                line = input_transform(self, [self._pixels(start, j) for j in range(size)])
                v = self.at(args["v"], b.add(place, b.mul(t, I64(MATRICES * LANES))))
                for j, value in enumerate(line):
                    self.store(value, self.at(v, I64(j * size * self.width)))
                return []

            self.loop(I64(0), args["tiles"], [], some, step=group)
            return []

        self.loop(I64(0), args["pitch"], [], down, step=self.width)
        self.loop(I64(0), I64(size), [], across)

    def _pixels(self, start: ir.Value, column: int) -> ir.Value:
        """Pixel number `column` of a few tiles."""
        b, quad = self.builder, ir.VectorType(F32, LANES)
        parts = []
        for tile in range(self.width // LANES):
            place = self.at(start, I64((tile * SIDE + column) * CHANNELS))
            parts.append(b.load(b.bitcast(place, quad.as_pointer()), align=4))
        while len(parts) > 1:
            lanes = range(2 * parts[0].type.count)
            order = ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes))
            parts = [
                b.shuffle_vector(*pair, order) for pair in zip(parts[::2], parts[1::2], strict=True)
            ]
        return parts[0]


class _Columns(_Colour):
    """Walks over columns of the 6 × 6 and, inside, over the tiles of a row."""

    ARGUMENTS = {  # noqa: RUF012
        "u": F32P,
        "filters": I64,
        "v": F32P,
        "halves": F32P,
        "tiles": I64,
    }
    """Weights or sums, K, and so on."""

    def write(self) -> None:
        b, args, size = self.builder, self.args, SIDE + 2
        group = self.width // LANES

        def column(j: ir.Value, _: Vectors) -> Vectors:
            start = self.at(args["u"], b.mul(j, b.mul(I64(CHANNELS), args["filters"])))
            self.places = [
                self.at(start, b.mul(I64(i * size * CHANNELS + c), args["filters"]))
                for i in range(size)
                for c in range(CHANNELS)
            ]
            v = self.at(args["v"], b.mul(j, I64(size * self.width)))
            halves = self.at(args["halves"], b.mul(j, I64(SIDE * self.width)))

            def tile(t: ir.Value, state: Vectors) -> Vectors:
                first = b.mul(b.udiv(t, I64(group)), I64(MATRICES * self.width))
                lane = b.mul(b.urem(t, I64(group)), I64(LANES))
                inputs = self.at(v, b.add(first, lane))
                half = self.at(halves, b.mul(t, I64(HALF * self.width)))
                return self.tile(inputs, half, state)

            self.finish(self.loop(I64(0), args["tiles"], self.begin(), tile))
            return []

        self.loop(I64(0), I64(size), [], column)

    def element(self, inputs: ir.Value, i: int, c: int) -> ir.Value:
        """Element of row i and channel c of a tile's inputs, in all lanes."""
        place = self.at(inputs, I64(i * self.width + c))
        return self.splat(self.builder.load(place, align=4))

    def half(self, half: ir.Value, i: int) -> ir.Value:
        """Where row i of a tile's half lies."""
        return self.at(half, I64(i * self.width))

    def begin(self) -> Vectors:
        """What goes from tile to tile."""
        raise NotImplementedError

    def tile(self, inputs: ir.Value, half: ir.Value, state: Vectors) -> Vectors:
        """Write the work of one tile and column."""
        raise NotImplementedError

    def finish(self, state: Vectors) -> None:
        """Keep what the last tile left."""


class _Products(_Columns):
    """Halves = Aᵀ (U ⊙ V): a column's weights stay in registers."""

    def begin(self) -> Vectors:
        self.weights = [self.load(place) for place in self.places]
        return []

    def tile(self, inputs: ir.Value, half: ir.Value, state: Vectors) -> Vectors:
        products = []
        for i in range(SIDE + 2):
            w = self.weights[i * CHANNELS : (i + 1) * CHANNELS]
            total = self.builder.fmul(self.element(inputs, i, 0), w[0])
            for c in range(1, CHANNELS):
                total = self.multiply_add(self.element(inputs, i, c), w[c], total)
            products.append(total)
        for i, value in enumerate(output_transform(self, products)):
            self.store(value, self.half(half, i))
        return []


class _Sums(_Columns):
    """Sums += V ⊙ A halves: a column's sums stay in registers."""

    def begin(self) -> Vectors:
        return [self.load(place) for place in self.places]

    def tile(self, inputs: ir.Value, half: ir.Value, state: Vectors) -> Vectors:
        gradients = gradient_transform(self, [self.load(self.half(half, i)) for i in range(SIDE)])
        return [
            self.multiply_add(self.element(inputs, i, c), gradient, state[i * CHANNELS + c])
            for i, gradient in enumerate(gradients)
            for c in range(CHANNELS)
        ]

    def finish(self, state: Vectors) -> None:
        for value, place in zip(state, self.places, strict=True):
            self.store(value, place)


class _Pooled(_Colour):
    """Walks over the 2 × 2 windows of a row of tiles, between halves and pooled maps.

    Of a row's windows only ``windows`` exist, and only ``rows`` rows of them; `line` is the
    distance of these rows, and K that of windows.
    """

    ARGUMENTS = {  # noqa: RUF012
        "halves": F32P,
        "values": F32P,
        "positions": I8P,
        "extra": F32P,
        "filters": I64,
        "line": I64,
        "rows": I64,
        "windows": I64,
    }
    """`values` are the pooled maps or their gradient, `extra` is the bias or its gradient."""
    every: ClassVar[bool] = False
    """True if rows of windows that do not exist are processed, too."""

    def write(self) -> None:
        b, args, per_tile = self.builder, self.args, SIDE // WINDOW
        tiles = b.udiv(b.add(args["windows"], I64(per_tile - 1)), I64(per_tile))

        def row(p: ir.Value, state: Vectors) -> Vectors:
            exists = b.icmp_signed("<", p, args["rows"])
            line = b.select(exists, b.mul(p, args["line"]), I64(0))

            def tile(t: ir.Value, state: Vectors) -> Vectors:
                first = b.mul(t, I64(per_tile))
                place = b.add(line, b.mul(first, args["filters"]))
                half = b.add(b.mul(t, I64(HALF)), b.mul(p, I64(WINDOW)))
                left = b.sub(args["windows"], first)
                half = self.at(args["halves"], b.mul(half, I64(self.width)))
                second = b.and_(exists, b.icmp_signed(">", left, I64(1)))
                return self.tile(half, place, (exists, second), state)

            return self.loop(I64(0), tiles, state, tile)

        rows = I64(per_tile) if self.every else args["rows"]
        self.finish(self.loop(I64(0), rows, self.begin(), row))

    def begin(self) -> Vectors:
        """What goes from tile to tile."""
        raise NotImplementedError

    def tile(
        self, half: ir.Value, place: ir.Value, exist: tuple[ir.Value, ir.Value], state: Vectors
    ) -> Vectors:
        """Write the work of two windows side by side, the first of them at `place`."""
        raise NotImplementedError

    def finish(self, state: Vectors) -> None:
        """Keep what the last tile left."""

    def line(self, half: ir.Value, i: int, j: int) -> ir.Value:
        """Where row i, column j of a half lies."""
        return self.at(half, I64((j * SIDE + i) * self.width))


class _Maxima(_Pooled):
    """Halves · A, maxima of windows, bias, ReLU."""

    def begin(self) -> Vectors:
        return [self.load(self.args["extra"])]

    def tile(
        self, half: ir.Value, place: ir.Value, exist: tuple[ir.Value, ir.Value], state: Vectors
    ) -> Vectors:
        outputs = []
        for i in range(WINDOW):
            line = [self.load(self.line(half, i, j)) for j in range(SIDE + 2)]
            outputs.append(output_transform(self, line))
        (bias,), second = state, self.builder.add(place, self.args["filters"])
        self._window([*outputs[0][:WINDOW], *outputs[1][:WINDOW]], place, bias)
        with self.builder.if_then(exist[1], likely=True):
            self._window([*outputs[0][WINDOW:], *outputs[1][WINDOW:]], second, bias)
        return [bias]

    def _window(self, values: Vectors, place: ir.Value, bias: ir.Value) -> None:
        b, lanes = self.builder, ir.VectorType(I32, self.width)

        def larger(x: ir.Value, y: ir.Value) -> ir.Value:
            return b.select(b.fcmp_ordered(">", x, y), x, y)

        largest = larger(larger(*values[:2]), larger(*values[2:]))
        position: ir.Value = ir.Constant(lanes, [len(values) - 1] * self.width)
        for i, value in reversed(list(enumerate(values[:-1]))):
            first = b.fcmp_ordered("==", value, largest)
            position = b.select(first, ir.Constant(lanes, [i] * self.width), position)
        # A NaN passes: it must reach the loss to be noticed.
        lost = b.or_(*(b.fcmp_unordered("uno", *values[i : i + 2]) for i in (0, 2)))
        nan = ir.Constant(self.vector, [float("nan")] * self.width)
        total = b.fadd(b.select(lost, nan, largest), bias)
        dead = b.fcmp_ordered("<=", total, self.zero)
        nowhere = ir.Constant(lanes, [NO_GRADIENT] * self.width)
        self.store(b.select(dead, self.zero, total), self.at(self.args["values"], place))
        position = b.trunc(b.select(dead, nowhere, position), ir.VectorType(I8, self.width))
        self.store(position, self.at(self.args["positions"], place))


class _Spread(_Pooled):
    """Gradients of windows to their maxima, · Aᵀ; those that have a place are added up, too."""

    every = True

    def begin(self) -> Vectors:
        return [self.load(self.args["extra"])]

    def finish(self, state: Vectors) -> None:
        self.store(state[0], self.args["extra"])

    def tile(
        self, half: ir.Value, place: ir.Value, exist: tuple[ir.Value, ir.Value], state: Vectors
    ) -> Vectors:
        b, args, lanes = self.builder, self.args, ir.VectorType(I32, self.width)
        total = state[0]
        rows: list[list[ir.Value]] = [[], []]
        second = b.add(place, b.select(exist[1], args["filters"], I64(0)))
        for at, exists in zip((place, second), exist, strict=True):
            gradient = b.select(exists, self.load(self.at(args["values"], at)), self.zero)
            position = b.zext(self.load(self.at(args["positions"], at), I8), lanes)
            for i in range(WINDOW):
                for j in range(WINDOW):
                    here = ir.Constant(lanes, [i * WINDOW + j] * self.width)
                    chosen = b.icmp_unsigned("==", position, here)
                    rows[i].append(b.select(chosen, gradient, self.zero))
            alive = b.icmp_unsigned("!=", position, ir.Constant(lanes, [NO_GRADIENT] * self.width))
            total = b.fadd(total, b.select(alive, gradient, self.zero))
        for i, row in enumerate(rows):
            for j, value in enumerate(gradient_transform(self, row)):
                self.store(value, self.line(half, i, j))
        return [total]


def _call(writer: type[_Colour], kinds: Sequence[Any]) -> Any:
    """What an intrinsic of these arguments returns: a call of what `writer` writes."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        flat = flatten_arguments(context, builder, sig.args, args)
        builder.call(writer(builder.module, compiled_registers().width).function, flat)
        return context.get_dummy_value()

    return types.none(*kinds), codegen


# fmt: off
@intrinsic
def transform_colours(typingctx, x, x_start, row, mixed, mixed_start, pitch, v, v_start, tiles):  # type: ignore[no-untyped-def]
    """Bᵀ x B of a row of tiles.

    Args:
        x: padded maps, whose first row of six begins at `x_start`; rows are `row` apart.
        mixed: scratch of six rows, `pitch` apart and long: whole vectors.
        v: the inputs.
        tiles: how many.
    """
    return _call(_Inputs, (x, x_start, row, mixed, mixed_start, pitch, v, v_start, tiles))


@intrinsic
def halve_products(typingctx, u, u_start, filters, v, v_start, halves, start, tiles):  # type: ignore[no-untyped-def]
    """Halves = Aᵀ (U ⊙ V) for a vector of filters, whose weights begin at `u_start`."""
    return _call(_Products, (u, u_start, filters, v, v_start, halves, start, tiles))


@intrinsic
def add_halves(typingctx, sums, s_start, filters, v, v_start, halves, start, tiles):  # type: ignore[no-untyped-def]
    """Sums += V ⊙ A halves for a vector of filters, whose sums begin at `s_start`."""
    return _call(_Sums, (sums, s_start, filters, v, v_start, halves, start, tiles))


@intrinsic
def pool_halves(  # type: ignore[no-untyped-def]
    typingctx, halves, start, y, y_start, argmax, argmax_start, b, b_start,
    filters, line, rows, windows,
):
    """Outputs of a vector of filters, halves · A, pooled, with bias and ReLU: y and argmax.

    Args:
        line: distance of rows of y.
        rows, windows: rows of windows that exist, 1 or 2, and windows of a row.
    """
    return _call(_Maxima, (
        halves, start, y, y_start, argmax, argmax_start, b, b_start, filters, line, rows, windows,
    ))


@intrinsic
def spread_halves(  # type: ignore[no-untyped-def]
    typingctx, halves, start, dy, dy_start, argmax, argmax_start, db, db_start,
    filters, line, rows, windows,
):
    """Halves = dz · Aᵀ for a vector of filters, dz unpooled from dy; db grows by dz's sum."""
    return _call(_Spread, (
        halves, start, dy, dy_start, argmax, argmax_start, db, db_start,
        filters, line, rows, windows,
    ))
# fmt: on
