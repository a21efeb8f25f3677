"""AMX products for few input channels: im2col rows that fill the tiles.

`tiles` splits every float32 into three bfloat16 parts and multiplies six pairs of them, each in an
instruction of its own for 32 steps of the sum. A row of a first layer's filter has nine elements or
so, which would leave most steps empty. Here the six products of one element share an instruction.
The unit takes pairs of bfloat16, so an element x of a patch becomes three pairs, and so does the
weight w that it meets:

    (x₀, x₁) · (w₀, w₀) + (x₀, x₁) · (w₁, w₁) + (x₀, x₂) · (w₂, w₀)

Nine elements are 27 pairs, two instructions' 32. Every row of the map is laid out once for each
column of the output, patch by patch, in whole lines: a tile's row that crosses lines costs the
unit's load three cycles instead of half a cycle (17 against 3 ns a tile). All rows of the filter
and two rows of the output share it.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from dptrain.backends.numba.amx import SIDE, Unit, emit, split
from dptrain.backends.numba.vector import F32P, I32, I32P, I64, Writer

PAIRS = 3
"""Pairs that an element becomes."""
PANEL = SIDE * SIDE
"""Pairs of a tile."""


def _paired(writer: Writer, value: ir.Value) -> tuple[list[ir.Value], list[ir.Value]]:
    """Parts of a vector as lower and as upper halves of pairs."""
    b = writer.builder
    sixteen, upper = writer.splat(I32(16)), writer.splat(I32(0xFFFF0000))
    parts = split(writer, value)
    return [b.lshr(part, sixteen) for part in parts], [b.and_(part, upper) for part in parts]


class _Begin(Unit):
    """Registers as `_Rows` wants them: C of two rows in 0 to 3, A in 4 and 5, B in 6 and 7."""

    arguments = {"height": I64}  # noqa: RUF012

    def __init__(self, module: ir.Module) -> None:
        super().__init__(module, "dptrain_tile_begin", self.arguments, SIDE)

    def write(self) -> None:
        height, whole = self.args["height"], I64(SIDE)
        self.configure([(range(6), height, whole), (range(6, 8), whole, whole)])


class _End(Unit):
    """Give the registers back."""

    def __init__(self, module: ir.Module) -> None:
        super().__init__(module, "dptrain_tile_end", {}, SIDE)

    def write(self) -> None:
        self.unit("tilerelease")


_PATCHES = {
    "source": F32P,
    "row": I64,
    "first": I64,
    "count": I64,
    "second_count": I64,
    "target": I32P,
    "second_target": I32P,
    "lanes": I32P,
    "vectors": I64,
    "distance": I64,
    "lines": I64,
}


class _Patches(Unit):
    """Lay out two rows of a map, some pixels for each vector that is loaded."""

    arguments = _PATCHES

    def __init__(self, module: ir.Module) -> None:
        super().__init__(module, "dptrain_tile_patches", self.arguments, SIDE)

    def write(self) -> None:
        self.lay_out(I64(0), self.builder.mul(self.args["vectors"], I64(2)))

    def lay_out(self, start: ir.Value, stop: ir.Value) -> None:
        """Lay out what comes from a range of the vectors, usual numbers of lines without a loop."""
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
        held = [self.load(self.at(args["lanes"], I64(j * SIDE)), I32) for j in range(lines or 0)]

        def vector(q: ir.Value, _: Sequence[ir.Value]) -> Sequence[ir.Value]:
            second = b.icmp_signed(">=", q, args["vectors"])
            i = b.sub(q, b.select(second, args["vectors"], I64(0)))
            offset = b.add(args["first"], b.mul(i, args["distance"]))
            # Before the row numbers are negative, so as unsigned ones they lie behind it.
            place = b.add(self.splat(b.trunc(offset, I32)), ramp)
            count = b.trunc(b.select(second, args["second_count"], args["count"]), I32)
            self.mask = b.icmp_unsigned("<", place, self.splat(count))
            offset = b.add(offset, b.select(second, args["row"], I64(0)))
            low, high = _paired(self, self.load(self.at(args["source"], offset), masked=True))
            pairs = b.or_(low[0], high[1]), b.or_(low[0], high[2])
            target = b.select(second, args["second_target"], args["target"])
            target = self.at(target, b.mul(b.mul(i, args["lines"]), I64(SIDE)))

            def line(j: ir.Value, lanes: ir.Value) -> Sequence[ir.Value]:
                chosen = b.call(permute, [pairs[0], lanes, pairs[1]])
                self.store(chosen, self.at(target, b.mul(j, I64(SIDE))))
                return []

            for j, lanes in enumerate(held):
                line(I64(j), lanes)
            if lines is None:
                self.loop(
                    I64(0), args["lines"], [],
                    lambda j, _: line(
                        j, self.load(self.at(args["lanes"], b.mul(j, I64(SIDE))), I32)
                    ),
                )  # fmt: skip
            return []

        self.loop(start, stop, [], vector)


class _Weights(Writer):
    """Pairs of 16 columns of a matrix, three lines for each of its rows."""

    arguments = {"source": F32P, "row": I64, "target": I32P, "count": I64}  # noqa: RUF012

    def __init__(self, module: ir.Module) -> None:
        super().__init__(module, "dptrain_tile_weights", self.arguments, SIDE)

    def write(self) -> None:
        b, args = self.builder, self.args

        def row(i: ir.Value, _: Sequence[ir.Value]) -> Sequence[ir.Value]:
            low, high = _paired(self, self.load(self.at(args["source"], b.mul(i, args["row"]))))
            place = b.mul(i, I64(PAIRS * SIDE))
            for j, pair in enumerate(((0, 0), (1, 1), (2, 0))):
                target = self.at(args["target"], b.add(place, I64(j * SIDE)))
                self.store(b.or_(low[pair[0]], high[pair[1]]), target)
            return []

        self.loop(I64(0), args["count"], [], row)


class _Rows(_Patches):
    """Two rows of the output, of whole column tiles, while two rows of the map are laid out.

    The unit multiplies on its own, and what vectors do in between costs next to nothing.
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
        Unit.__init__(self, module, "dptrain_tile_rows", self.arguments, SIDE)

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
        """Lay out a few vectors."""
        b, args = self.builder, self.args
        start, all_ = b.load(self.done), b.mul(args["vectors"], I64(2))
        stop = b.add(start, args["between"])
        stop = b.select(b.icmp_signed("<", stop, all_), stop, all_)
        self.lay_out(start, stop)
        b.store(stop, self.done)

    def tiles(self, k: ir.Value, tiles: Sequence[ir.Value]) -> None:
        """One column tile and some row tiles of both rows."""
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
                """What row i of the input gives to rows of the output.

                Row i of the filter, in register `new`, is for the first, the row before it, in
                `old`, for the second.
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
                place = b.add(pixel, b.mul(args["width"], I64(output)))
                target = self.at(args["c"], b.add(b.mul(place, args["c_row"]), column))
                self.store_tile(2 * output + m, target, b.mul(args["c_row"], I64(4)))


@intrinsic
def lay_out_patches(typingctx, source, counts, targets, lanes, shape):  # type: ignore[no-untyped-def]
    """Lay out two rows of a map.

    Args:
        source: (contiguous array, start, distance of rows, where the first patch starts in a row,
            negative in the padding).
        counts: how many elements of each row exist; 0 for a row of padding.
        targets: (int32, start, int32, start).
        lanes: (int32, start) for every line, which pairs it takes: 0 to 15 of (x₀, x₁), from 16 on
            of (x₀, x₂).
        shape: (vectors to load of a row, their distance, lines that each becomes).
    """
    return types.none(source, counts, targets, lanes, shape), emit(_Patches)


@intrinsic
def lay_out_weights(typingctx, source, row, target, count):  # type: ignore[no-untyped-def]
    """Pairs of 16 columns of `count` rows, `row` from each other in the source."""
    return types.none(source, row, target, count), emit(_Weights)


@intrinsic
def begin_rows(typingctx, height):  # type: ignore[no-untyped-def]
    """Prepare the unit for `multiply_rows` with tiles of `height` pixels."""
    return types.none(height), emit(_Begin)


@intrinsic
def end_rows(typingctx):  # type: ignore[no-untyped-def]
    """Let the unit rest."""
    return types.none(), emit(_End)


@intrinsic
def multiply_rows(  # type: ignore[no-untyped-def]
    typingctx, a, a_rows, b, c, c_row, bias, shape, source, counts, targets, lanes, patches
):
    """Two rows of the output, while two rows of the map are laid out as by `lay_out_patches`.

    Args:
        a: (int32, start) rows of the input, laid out; `a_rows` (table, first entry) where each of
            those that the filter meets begins.
        b: (int32, start) weights, laid out by column tiles and filter rows.
        c: (float32, start) the two rows, one behind the other; `c_row` distance of pixels.
        bias: (float32, start).
        shape: (pixels of a tile, tiles of a row, pixels of a row, filter rows, lines of a patch,
            columns, vectors to lay out between products).
    """
    return types.none(
        a, a_rows, b, c, c_row, bias, shape, source, counts, targets, lanes, patches
    ), emit(_Rows)
