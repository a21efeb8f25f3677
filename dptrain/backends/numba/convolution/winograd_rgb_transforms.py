"""Transforms of Winograd F(4×4, 3×3) for RGB images, fused with 2 × 2 max pooling.

`winograd_transforms` defines the matrices A, B and G and computes 4 × 4 outputs with 36 products
instead of 144. Three input channels do not fill a vector, and 36 matrix products with three steps
are dominated by loads and stores. Therefore a vector of inputs holds adjacent tiles, with four
elements for each: the three channels of a pixel and an unused element. Products stay in registers
until the first of the next two one-dimensional transforms has been applied:

    forward          (G w Gᵀ) ⊙ (Bᵀ x B)  →  Aᵀ ·  →  stored  →  · A, pooled, stored
    weight gradient  dy, unpooled  →  · Aᵀ  →  stored  →  A ·  →  ⊙ (Bᵀ x B), summed

The stored *intermediates* are 4 × 6 vectors of a tile, for one vector of filters. Memory layouts:

- inputs: (group of tiles, column of the 6 × 6, row, tile of the group, 4);
- intermediates: (tile, column, row of the 4, filter of the vector);
- weights and sums: (row, column, channel, K).

Every function processes one row of tiles of one sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from llvmlite import ir

from dptrain.backends.numba.convolution.winograd_transforms import (
    MATRICES,
    SIDE,
    gradient_transform,
    input_transform,
    output_transform,
)
from dptrain.backends.numba.pooling.pooling_windows import NO_GRADIENT, positive_maximum
from dptrain.backends.numba.vector import (
    F32,
    F32P,
    I8,
    I8P,
    I32,
    I64,
    Writer,
    as_intrinsic,
    call_of,
    compiled_registers,
)

CHANNELS = 3
LANES = 4
"""Elements of an input vector for each tile."""
WINDOW = 2
"""Height and width of a pooling window."""
INTERMEDIATES = SIDE * (SIDE + 2)
"""Vectors of the intermediates of a tile."""

Vectors = Sequence[ir.Value]


class _RgbTransform(Writer):
    """Base class of the functions of this module.

    Args:
        width: filters of a vector.
        masked: True if only the first ``columns`` filters of the vector exist in y, dy and bias.
    """

    ARGUMENTS: ClassVar[Mapping[str, ir.Type]]

    def __init__(self, module: ir.Module, width: int, masked: bool = False) -> None:
        self.masked = masked
        self.inputs_width = compiled_registers().width
        name = f"dptrain_rgb_{type(self).__name__.strip('_').lower()}_x{width}"
        super().__init__(module, name + masked * "_masked", self.ARGUMENTS, width)


class _Inputs(_RgbTransform):
    """Computes Bᵀ x B of a row of tiles.

    `mixed` receives Bᵀ x: six rows of `pitch` elements.
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
            row, v_row = self.at(args["mixed"], b.mul(i, args["pitch"])), b.mul(i, I64(self.width))

            def some(t: ir.Value, _: Vectors) -> Vectors:
                start = self.at(row, b.mul(t, I64(SIDE * CHANNELS)))
                line = input_transform(self, [self._pixels(start, j) for j in range(size)])
                v = self.at(args["v"], b.add(v_row, b.mul(t, I64(MATRICES * LANES))))
                for j, value in enumerate(line):
                    self.store(value, self.at(v, I64(j * size * self.width)))
                return []

            self.loop(I64(0), args["tiles"], [], some, step=group)
            return []

        self.loop(I64(0), args["pitch"], [], down, step=self.width)
        self.loop(I64(0), I64(size), [], across)

    def _pixels(self, start: ir.Value, column: int) -> ir.Value:
        """Load pixel number `column` of the tiles of a vector."""
        b, quad = self.builder, ir.VectorType(F32, LANES)
        parts = []
        for tile in range(self.width // LANES):
            pixel = self.at(start, I64((tile * SIDE + column) * CHANNELS))
            parts.append(b.load(b.bitcast(pixel, quad.as_pointer()), align=4))
        while len(parts) > 1:
            lanes = range(2 * parts[0].type.count)
            order = ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes))
            parts = [
                b.shuffle_vector(*pair, order) for pair in zip(parts[::2], parts[1::2], strict=True)
            ]
        return parts[0]


class _Columns(_RgbTransform):
    """Loops over the columns of the 6 × 6 products and, inside, over the tiles of a row."""

    ARGUMENTS = {  # noqa: RUF012
        "u": F32P,
        "filters": I64,
        "v": F32P,
        "intermediates": F32P,
        "tiles": I64,
        "columns": I64,
    }
    """`u` is the weights or the sums of their gradient, `filters` is their row stride."""

    def write(self) -> None:
        b, args, size = self.builder, self.args, SIDE + 2
        group = self.inputs_width // LANES

        def column(j: ir.Value, _: Vectors) -> Vectors:
            start = self.at(args["u"], b.mul(j, b.mul(I64(CHANNELS), args["filters"])))
            self.addresses = [
                self.at(start, b.mul(I64(i * size * CHANNELS + c), args["filters"]))
                for i in range(size)
                for c in range(CHANNELS)
            ]
            v = self.at(args["v"], b.mul(j, I64(size * self.inputs_width)))
            intermediates = self.at(args["intermediates"], b.mul(j, I64(SIDE * self.width)))

            def tile(t: ir.Value, state: Vectors) -> Vectors:
                first = b.mul(b.udiv(t, I64(group)), I64(MATRICES * self.inputs_width))
                lane = b.mul(b.urem(t, I64(group)), I64(LANES))
                inputs = self.at(v, b.add(first, lane))
                start = self.at(intermediates, b.mul(t, I64(INTERMEDIATES * self.width)))
                return self.tile(inputs, start, state)

            self.finish(self.loop(I64(0), args["tiles"], self.begin(), tile))
            return []

        self.loop(I64(0), I64(size), [], column)

    def element(self, inputs: ir.Value, i: int, c: int) -> ir.Value:
        """Broadcast the element of row i and channel c of a tile's inputs."""
        address = self.at(inputs, I64(i * self.inputs_width + c))
        return self.splat(self.builder.load(address, align=4))

    def intermediate(self, start: ir.Value, i: int) -> ir.Value:
        """Return the address of row i of a column of a tile's intermediates."""
        return self.at(start, I64(i * self.width))

    def begin(self) -> Vectors:
        """Return the initial state of the loop over tiles."""
        raise NotImplementedError

    def tile(self, inputs: ir.Value, start: ir.Value, state: Vectors) -> Vectors:
        """Process one column of one tile and return the new state."""
        raise NotImplementedError

    def finish(self, state: Vectors) -> None:
        """Store the final state."""


class _ProductColumns(_Columns):
    """Intermediates = Aᵀ (U ⊙ V); the weights of a column stay in registers."""

    def begin(self) -> Vectors:
        self.weights = [self.load(address) for address in self.addresses]
        return []

    def tile(self, inputs: ir.Value, start: ir.Value, state: Vectors) -> Vectors:
        products = []
        for i in range(SIDE + 2):
            w = self.weights[i * CHANNELS : (i + 1) * CHANNELS]
            total = self.builder.fmul(self.element(inputs, i, 0), w[0])
            for c in range(1, CHANNELS):
                total = self.multiply_add(self.element(inputs, i, c), w[c], total)
            products.append(total)
        for i, value in enumerate(output_transform(self, products)):
            self.store(value, self.intermediate(start, i))
        return []


class _GradientSums(_Columns):
    """Sums += V ⊙ (A · intermediates); the sums of a column stay in registers."""

    def begin(self) -> Vectors:
        return [self.load(address) for address in self.addresses]

    def tile(self, inputs: ir.Value, start: ir.Value, state: Vectors) -> Vectors:
        gradients = gradient_transform(
            self, [self.load(self.intermediate(start, i)) for i in range(SIDE)]
        )
        return [
            self.multiply_add(self.element(inputs, i, c), gradient, state[i * CHANNELS + c])
            for i, gradient in enumerate(gradients)
            for c in range(CHANNELS)
        ]

    def finish(self, state: Vectors) -> None:
        for value, address in zip(state, self.addresses, strict=True):
            self.store(value, address)


class _PooledRows(_RgbTransform):
    """Loops over the 2 × 2 windows of a row of tiles, between intermediates and pooled maps.

    Only ``windows`` windows of a row and ``rows`` rows of windows exist. `line` is the stride of
    the rows, and K is the stride of the windows.
    """

    ARGUMENTS = {  # noqa: RUF012
        "intermediates": F32P,
        "values": F32P,
        "positions": I8P,
        "extra": F32P,
        "filters": I64,
        "line": I64,
        "rows": I64,
        "windows": I64,
        "columns": I64,
    }
    """`values` are the pooled maps or their gradient, `extra` is the bias or its gradient."""
    every: ClassVar[bool] = False
    """True if rows of windows that do not exist are also processed."""

    def write(self) -> None:
        b, args, per_tile = self.builder, self.args, SIDE // WINDOW
        if self.masked:
            self.mask_after(args["columns"])
        tiles = b.udiv(b.add(args["windows"], I64(per_tile - 1)), I64(per_tile))

        def row(p: ir.Value, state: Vectors) -> Vectors:
            exists = b.icmp_signed("<", p, args["rows"])
            line = b.select(exists, b.mul(p, args["line"]), I64(0))

            def tile(t: ir.Value, state: Vectors) -> Vectors:
                first = b.mul(t, I64(per_tile))
                offset = b.add(line, b.mul(first, args["filters"]))
                start = b.add(b.mul(t, I64(INTERMEDIATES)), b.mul(p, I64(WINDOW)))
                left = b.sub(args["windows"], first)
                start = self.at(args["intermediates"], b.mul(start, I64(self.width)))
                second = b.and_(exists, b.icmp_signed(">", left, I64(1)))
                return self.tile(start, offset, (exists, second), state)

            return self.loop(I64(0), tiles, state, tile)

        rows = I64(per_tile) if self.every else args["rows"]
        self.finish(self.loop(I64(0), rows, self.begin(), row))

    def begin(self) -> Vectors:
        """Return the initial state of the loop over tiles."""
        raise NotImplementedError

    def tile(
        self, start: ir.Value, offset: ir.Value, exist: tuple[ir.Value, ir.Value], state: Vectors
    ) -> Vectors:
        """Process two adjacent windows, of which the first is at `offset`."""
        raise NotImplementedError

    def finish(self, state: Vectors) -> None:
        """Store the final state."""

    def line(self, start: ir.Value, i: int, j: int) -> ir.Value:
        """Return the address of row i and column j of a tile's intermediates."""
        return self.at(start, I64((j * SIDE + i) * self.width))


class _MaxPooling(_PooledRows):
    """Computes intermediates · A, the maxima of windows, the bias and ReLU."""

    def begin(self) -> Vectors:
        return [self.load(self.args["extra"], masked=self.masked)]

    def tile(
        self, start: ir.Value, offset: ir.Value, exist: tuple[ir.Value, ir.Value], state: Vectors
    ) -> Vectors:
        outputs = []
        for i in range(WINDOW):
            line = [self.load(self.line(start, i, j)) for j in range(SIDE + 2)]
            outputs.append(output_transform(self, line))
        (bias,), second = state, self.builder.add(offset, self.args["filters"])
        self._window([*outputs[0][:WINDOW], *outputs[1][:WINDOW]], offset, bias)
        with self.builder.if_then(exist[1], likely=True):
            self._window([*outputs[0][WINDOW:], *outputs[1][WINDOW:]], second, bias)
        return [bias]

    def _window(self, values: Vectors, offset: ir.Value, bias: ir.Value) -> None:
        value, position = positive_maximum(self, values, I32, bias)
        self.store(value, self.at(self.args["values"], offset), self.masked)
        position = self.builder.trunc(position, ir.VectorType(I8, self.width))
        self.store(position, self.at(self.args["positions"], offset), self.masked)


class _Unpooling(_PooledRows):
    """Unpools dy and multiplies by Aᵀ; `extra` receives the bias gradient."""

    every = True

    def begin(self) -> Vectors:
        return [self.load(self.args["extra"], masked=self.masked)]

    def finish(self, state: Vectors) -> None:
        self.store(state[0], self.args["extra"], self.masked)

    def tile(
        self, start: ir.Value, offset: ir.Value, exist: tuple[ir.Value, ir.Value], state: Vectors
    ) -> Vectors:
        b, args, lanes = self.builder, self.args, ir.VectorType(I32, self.width)
        total = state[0]
        rows: list[list[ir.Value]] = [[], []]
        second = b.add(offset, b.select(exist[1], args["filters"], I64(0)))
        for at, exists in zip((offset, second), exist, strict=True):
            value = self.load(self.at(args["values"], at), masked=self.masked)
            gradient = b.select(exists, value, self.zero)
            address = self.at(args["positions"], at)
            position = b.zext(self.load(address, I8, self.masked), lanes)
            for i in range(WINDOW):
                for j in range(WINDOW):
                    here = ir.Constant(lanes, [i * WINDOW + j] * self.width)
                    chosen = b.icmp_unsigned("==", position, here)
                    rows[i].append(b.select(chosen, gradient, self.zero))
            alive = b.icmp_unsigned("!=", position, ir.Constant(lanes, [NO_GRADIENT] * self.width))
            total = b.fadd(total, b.select(alive, gradient, self.zero))
        for i, row in enumerate(rows):
            for j, value in enumerate(gradient_transform(self, row)):
                self.store(value, self.line(start, i, j))
        return [total]


def _for_filters(writer: type[_RgbTransform]) -> Any:
    """Return the function of a transform whose last argument is the number of filters.

    The width follows from it: at most half a vector of filters is processed in vectors of half the
    width, which take half of the time on processors that split wide vectors.
    """

    def emit(builder: ir.IRBuilder, flat: list[ir.Value]) -> None:
        width, columns = compiled_registers().width, flat[-1]

        def call(width: int, masked: bool) -> None:
            builder.call(writer(builder.module, width, masked).function, flat)

        with builder.if_else(builder.icmp_signed(">=", columns, I64(width))) as (whole, some):
            with whole:
                call(width, False)
            with some:
                half = builder.icmp_signed("<=", columns, I64(width // 2))
                with builder.if_else(half) as (few, many):
                    with few:
                        call(width // 2, True)
                    with many:
                        call(width, True)

    return as_intrinsic(writer.ARGUMENTS, emit)


transform_rgb_inputs = as_intrinsic(_Inputs.ARGUMENTS, call_of(_Inputs))
"""Compute Bᵀ x B of a row of tiles: (x, start, row, mixed, start, pitch, v, start, tiles), of which

- x are padded maps; the first of six rows begins at its start, and `row` is the row stride,
- mixed is scratch of six rows of `pitch` elements, a multiple of the vector width,
- v are the transformed inputs,
- tiles is the number of tiles.
"""

transform_product_columns = _for_filters(_ProductColumns)
"""Compute Aᵀ (U ⊙ V) for a vector of filters.

Arguments: (u, start, filters, v, start, intermediates, start, tiles, columns); `filters` is the row
stride of the weights, whose rows have whole vectors, and `columns` are the filters of the vector
that exist, also in the functions below.
"""

add_weight_gradients = _for_filters(_GradientSums)
"""Add V ⊙ (A · intermediates) to the sums of a vector of filters.

Arguments: (sums, start, filters, v, start, intermediates, start, tiles, columns).
"""

transform_rows_and_pool = _for_filters(_MaxPooling)
"""Compute y and argmax of a vector of filters: intermediates · A, bias, ReLU, max pooling.

Arguments: (intermediates, start, y, start, argmax, start, b, start, filters, line, rows, windows,
columns); `line` is the row stride of y, `rows` are the rows of windows that exist, 1 or 2, and
`windows` are the windows of a row.
"""

unpool_and_transform_rows = _for_filters(_Unpooling)
"""Compute dz · Aᵀ for a vector of filters; dz is unpooled dy. Add the sum of dz to db.

Arguments: those of `transform_rows_and_pool`, with dy and db instead of y and b.
"""
