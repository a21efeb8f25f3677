"""AMX products for few input channels, with im2col rows that fill the tiles.

`amx` splits every float32 into three bfloat16 parts and multiplies six pairs of parts, each with a
separate instruction for 32 steps of the sum. A filter row of a first layer has about nine elements,
so most of the 32 steps would be empty. Here the six products of one element share an instruction.
The AMX unit multiplies pairs of bfloat16 numbers, so an element x of a patch is stored as three
pairs, and so is its weight w:

    (x₀, x₁) · (w₀, w₀) + (x₀, x₁) · (w₁, w₁) + (x₀, x₂) · (w₂, w₀)

Nine elements are 27 pairs, and two instructions have 32. Every row of the map is stored once in
im2col form: for each column of the output its patch, in whole cache lines. Loading a tile whose
rows cross cache lines takes 17 ns instead of 3 ns. All filter rows and two rows of the output read
the same im2col rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from dptrain.backends.numba.amx import SIDE, TileWriter, emit, split
from dptrain.backends.numba.vector import F32P, I32, I32P, I64, Writer

PAIRS = 3
"""Pairs for each element."""
PANEL = SIDE * SIDE
"""Pairs of a tile."""


def _paired(writer: Writer, value: ir.Value) -> tuple[list[ir.Value], list[ir.Value]]:
    """Return the parts of a vector as lower and as upper halves of pairs."""
    b = writer.builder
    sixteen, upper = writer.splat(I32(16)), writer.splat(I32(0xFFFF0000))
    parts = split(writer, value)
    return [b.lshr(part, sixteen) for part in parts], [b.and_(part, upper) for part in parts]


class _Begin(TileWriter):
    """Configures registers for `_Rows`: C of two rows in 0 to 3, A in 4 and 5, B in 6 and 7."""

    arguments = {"height": I64}  # noqa: RUF012

    def __init__(self, module: ir.Module) -> None:
        super().__init__(module, "dptrain_tile_begin", self.arguments, SIDE)

    def write(self) -> None:
        height, whole = self.args["height"], I64(SIDE)
        self.configure([(range(6), height, whole), (range(6, 8), whole, whole)])


class _End(TileWriter):
    """Releases the tile registers."""

    def __init__(self, module: ir.Module) -> None:
        super().__init__(module, "dptrain_tile_end", {}, SIDE)

    def write(self) -> None:
        self.call_instruction("tilerelease")


_PATCHES = {
    "source": F32P,
    "row": I64,
    "first": I64,
    "count": I64,
    "second_count": I64,
    "target": I32P,
    "second_target": I32P,
    "pair_indices": I32P,
    "vectors": I64,
    "distance": I64,
    "lines": I64,
}


class _Patches(TileWriter):
    """Stores two rows of a map in im2col form, several pixels for each loaded vector."""

    arguments = _PATCHES

    def __init__(self, module: ir.Module) -> None:
        super().__init__(module, "dptrain_tile_patches", self.arguments, SIDE)

    def write(self) -> None:
        self.lay_out(I64(0), self.builder.mul(self.args["vectors"], I64(2)))

    def lay_out(self, start: ir.Value, stop: ir.Value) -> None:
        """Store a range of the vectors in im2col form; 3 and 6 lines have unrolled code."""
        b, lines = self.builder, self.args["lines"]
        with b.if_else(b.icmp_signed("==", lines, I64(6))) as (six, other):
            with six:
                self._lay_out(start, stop, 6)
            with other, b.if_else(b.icmp_signed("==", lines, I64(3))) as (three, any_):
                with three:
                    self._lay_out(start, stop, 3)
                with any_:
                    self._lay_out(start, stop, None)

    def _lay_out(self, start: ir.Value, stop: ir.Value, lines: int | None) -> None:
        b, args = self.builder, self.args
        ints = ir.VectorType(I32, SIDE)
        ramp = ir.Constant(ints, list(range(SIDE)))
        kind = ir.FunctionType(ints, [ints] * 3)
        permute = cgutils.get_or_insert_function(
            self.module, kind, "llvm.x86.avx512.vpermi2var.d.512"
        )
        held = [
            self.load(self.at(args["pair_indices"], I64(j * SIDE)), I32) for j in range(lines or 0)
        ]

        def vector(q: ir.Value, _: Sequence[ir.Value]) -> Sequence[ir.Value]:
            second = b.icmp_signed(">=", q, args["vectors"])
            i = b.sub(q, b.select(second, args["vectors"], I64(0)))
            offset = b.add(args["first"], b.mul(i, args["distance"]))
            # Offsets before the row are negative: as unsigned numbers they exceed the row's count.
            elements = b.add(self.splat(b.trunc(offset, I32)), ramp)
            count = b.trunc(b.select(second, args["second_count"], args["count"]), I32)
            self.mask = b.icmp_unsigned("<", elements, self.splat(count))
            offset = b.add(offset, b.select(second, args["row"], I64(0)))
            low, high = _paired(self, self.load(self.at(args["source"], offset), masked=True))
            pairs = b.or_(low[0], high[1]), b.or_(low[0], high[2])
            target = b.select(second, args["second_target"], args["target"])
            target = self.at(target, b.mul(b.mul(i, args["lines"]), I64(SIDE)))

            def line(j: ir.Value, indices: ir.Value) -> Sequence[ir.Value]:
                chosen = b.call(permute, [pairs[0], indices, pairs[1]])
                self.store(chosen, self.at(target, b.mul(j, I64(SIDE))))
                return []

            for j, indices in enumerate(held):
                line(I64(j), indices)
            if lines is None:
                self.loop(
                    I64(0), args["lines"], [],
                    lambda j, _: line(
                        j, self.load(self.at(args["pair_indices"], b.mul(j, I64(SIDE))), I32)
                    ),
                )  # fmt: skip
            return []

        self.loop(start, stop, [], vector)


class _Weights(Writer):
    """Stores 16 columns of a matrix as pairs, three lines for each row."""

    arguments = {"source": F32P, "row": I64, "target": I32P, "count": I64}  # noqa: RUF012

    def __init__(self, module: ir.Module) -> None:
        super().__init__(module, "dptrain_tile_weights", self.arguments, SIDE)

    def write(self) -> None:
        b, args = self.builder, self.args

        def row(i: ir.Value, _: Sequence[ir.Value]) -> Sequence[ir.Value]:
            low, high = _paired(self, self.load(self.at(args["source"], b.mul(i, args["row"]))))
            row_start = b.mul(i, I64(PAIRS * SIDE))
            for j, pair in enumerate(((0, 0), (1, 1), (2, 0))):
                target = self.at(args["target"], b.add(row_start, I64(j * SIDE)))
                self.store(b.or_(low[pair[0]], high[pair[1]]), target)
            return []

        self.loop(I64(0), args["count"], [], row)


class _Rows(_Patches):
    """Computes two rows of the output while it stores two rows of the map in im2col form.

    The AMX unit works in parallel with the vector units, so the im2col stores take almost no time.
    """

    arguments = {  # noqa: RUF012
        "a": I32P,
        "a_rows": I32P,
        "b": I32P,
        "c": F32P,
        "c_row": I64,
        "bias": F32P,
        "height": I64,
        "tiles": I64,
        "width": I64,
        "filter": I64,
        "steps": I64,
        "columns": I64,
        "between": I64,
        **_PATCHES,
    }

    def __init__(self, module: ir.Module) -> None:
        TileWriter.__init__(self, module, "dptrain_tile_rows", self.arguments, SIDE)

    def write(self) -> None:
        b, args, whole = self.builder, self.args, I64(SIDE)
        self.done = b.alloca(I64)
        b.store(I64(0), self.done)
        self.panel = b.mul(b.mul(args["filter"], args["steps"]), I64(PANEL))
        even = b.and_(args["tiles"], I64(-2))

        def column(k: ir.Value, _: Sequence[ir.Value]) -> Sequence[ir.Value]:
            def pair(m: ir.Value, _: Sequence[ir.Value]) -> Sequence[ir.Value]:
                self.tiles(k, [m, b.add(m, I64(1))])
                return []

            self.loop(I64(0), even, [], pair, step=2)
            with b.if_then(b.icmp_signed("<", even, args["tiles"])):
                self.tiles(k, [even])
            return []

        self.loop(I64(0), b.sdiv(args["columns"], whole), [], column)
        self.lay_out(b.load(self.done), b.mul(args["vectors"], I64(2)))

    def advance(self) -> None:
        """Store the next `between` vectors in im2col form."""
        b, args = self.builder, self.args
        start, all_ = b.load(self.done), b.mul(args["vectors"], I64(2))
        stop = b.add(start, args["between"])
        stop = b.select(b.icmp_signed("<", stop, all_), stop, all_)
        self.lay_out(start, stop)
        b.store(stop, self.done)

    def tiles(self, k: ir.Value, tiles: Sequence[ir.Value]) -> None:
        """Compute one column tile and some row tiles of both rows."""
        b, args, line = self.builder, self.args, I64(4 * SIDE)
        last = b.sub(args["width"], args["height"])
        pixels = []
        for tile in tiles:
            pixel = b.mul(tile, args["height"])
            pixels.append(b.select(b.icmp_signed("<", pixel, last), pixel, last))
        panel = self.at(args["b"], b.mul(k, self.panel))
        column = b.mul(k, I64(SIDE))
        bias = self.at(args["bias"], column)
        for c in range(4):
            if c % 2 < len(tiles):
                self.load_tile(c, bias, I64(0))

        def step(t: ir.Value, _: Sequence[ir.Value]) -> Sequence[ir.Value]:
            across = b.mul(args["steps"], I64(SIDE))
            starts = [
                self.at(args["a"], b.add(b.mul(pixel, across), b.mul(t, I64(SIDE))))
                for pixel in pixels
            ]

            def row(i: ir.Value, new: int | None, old: int | None) -> None:
                """Add the products of row i of the input to both rows of the output.

                The first output row uses filter row i, in register `new`; the second one uses
                filter row i − 1, in register `old`.
                """
                if new is not None:
                    number = b.add(b.mul(i, args["steps"]), t)
                    self.load_tile(new, self.at(panel, b.mul(number, I64(PANEL))), line)
                offset = b.sext(b.load(self.at(args["a_rows"], i)), I64)
                for m, start in enumerate(starts):
                    self.load_tile(4 + m, self.at(start, offset), b.mul(across, I64(4)))
                for output, register in enumerate((new, old)):
                    if register is not None:
                        for m in range(len(starts)):
                            self.multiply(2 * output + m, 4 + m, register)
                self.advance()

            def two(i: ir.Value, _: Sequence[ir.Value]) -> Sequence[ir.Value]:
                row(i, 7, 6)
                row(b.add(i, I64(1)), 6, 7)
                return []

            row(I64(0), 6, None)
            self.loop(I64(1), args["filter"], [], two, step=2)
            row(args["filter"], None, 6)
            return []

        self.loop(I64(0), args["steps"], [], step)
        for output in range(2):
            for m, pixel in enumerate(pixels):
                row = b.add(pixel, b.mul(args["width"], I64(output)))
                target = self.at(args["c"], b.add(b.mul(row, args["c_row"]), column))
                self.store_tile(2 * output + m, target, b.mul(args["c_row"], I64(4)))


@intrinsic
def lay_out_patches(typingctx, source, counts, targets, pair_indices, shape):  # type: ignore[no-untyped-def]
    """Store two rows of a map in im2col form.

    Args:
        source: (contiguous array, start, row stride, start of the first patch in a row, which is
            negative in the padding).
        counts: existing elements of each row; 0 for a row of padding.
        targets: (int32, start, int32, start).
        pair_indices: (int32, start). For every line, the indices of its pairs: 0 to 15 select from
            (x₀, x₁), and 16 to 31 select from (x₀, x₂).
        shape: (vectors to load of a row, their stride, lines for each vector).
    """
    return types.none(source, counts, targets, pair_indices, shape), emit(_Patches)


@intrinsic
def lay_out_weights(typingctx, source, row, target, count):  # type: ignore[no-untyped-def]
    """Store 16 columns of `count` rows as pairs; `row` is the row stride of the source."""
    return types.none(source, row, target, count), emit(_Weights)


@intrinsic
def begin_rows(typingctx, height):  # type: ignore[no-untyped-def]
    """Configure the tile registers for `multiply_rows` with tiles of `height` pixels."""
    return types.none(height), emit(_Begin)


@intrinsic
def end_rows(typingctx):  # type: ignore[no-untyped-def]
    """Release the tile registers."""
    return types.none(), emit(_End)


@intrinsic
def multiply_rows(  # type: ignore[no-untyped-def]
    typingctx, a, a_rows, b, c, c_row, bias, shape, source, counts, targets, pair_indices, patches
):
    """Compute two rows of the output, and store two rows of the map as `lay_out_patches` does.

    Args:
        a: (int32, start), rows of the input in im2col form; `a_rows` is (table, first entry), the
            starts of the rows under the filter.
        b: (int32, start), packed weights by column tiles and filter rows.
        c: (float32, start), the two rows, one after the other; `c_row` is the pixel stride.
        bias: (float32, start).
        shape: (pixels of a tile, tiles of a row, pixels of a row, filter rows, lines of a patch,
            columns, vectors to store between products).
    """
    return types.none(
        a, a_rows, b, c, c_row, bias, shape, source, counts, targets, pair_indices, patches
    ), emit(_Rows)
