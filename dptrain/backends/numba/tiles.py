"""Matrix products on a processor's tile unit (Intel AMX), to float32's own accuracy.

The unit multiplies bfloat16 and sums in float32, 16 times as many products a cycle as vectors of
float32. A float32 has 24 significant bits, a bfloat16 has 8, so every float32 is the sum of three
bfloat16 parts, x = x₀ + x₁ + x₂, with no error at all: each part is what the rounding of the ones
before it left. Of the nine products of parts

    x·y ≈ x₀y₀ + x₀y₁ + x₁y₀ + x₁y₁ + x₀y₂ + x₂y₀

keeps the six largest. What it drops is below 2⁻²⁵ of |x·y|, half of what rounding the product to
float32 would cost, and bfloat16 products are exact in float32. So the result is a float32 product
by other means: six products at 16 times the rate. (Henry, Tang and Heinecke, "Leveraging the
bfloat16 artificial intelligence datatype for higher-precision computations", 2019.)

Operands are prepared once and used often:

- *rows* of A: each part of a matrix lies by itself, in the order of the source, `part` elements
  from the next;
- *panels* of B: for 16 columns and 32 steps, each part as the unit wants it, pairs of steps side
  by side; panels of one column tile lie behind each other.

An infinite element becomes a NaN, parts below 2⁻¹²⁶ count as zero.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from dptrain.backends.numba.vector import F32P, I8, I8P, I32, I32P, I64, Writer, flatten_arguments, transposed

I16 = ir.IntType(16)
I16P = I16.as_pointer()

PARTS = 3
STEPS = 32
"""Steps of the sum in one panel of B."""
SIDE = 16
"""Rows and columns of a tile of C at most."""
MOST_COPIES = 32
"""Columns of a filter at most."""
PANEL = PARTS * STEPS * SIDE
"""Elements of a panel."""



@dataclass(frozen=True)
class _Shape:
    """Tiles of C that are summed side by side, and what the eight registers hold.

    Attributes:
        across: column tiles; row tiles are two, or one at the end.
        sums, rows, panels: registers of C, A and B.
        order: which parts of A and B are multiplied, one pair after the other. Where registers
            hold one part of B at a time, only one operand changes from pair to pair.
    """

    across: int
    sums: tuple[int, ...]
    rows: tuple[int, ...]
    panels: tuple[int, ...]
    order: tuple[tuple[int, int], ...]


_SHAPES = (
    _Shape(2, (0, 1, 2, 3), (4, 5), (6, 7), ((0, 2), (0, 1), (1, 1), (1, 0), (2, 0), (0, 0))),
    _Shape(1, (0, 1), (2, 3), (4, 5, 6), ((2, 0), (1, 0), (1, 1), (0, 1), (0, 0), (0, 2))),
)


@functools.cache
def available() -> bool:
    """Whether kernels may use the unit: compiled for, and granted by the operating system."""
    from numba.core.registry import cpu_target

    _, _, features = cpu_target.target_context.codegen().magic_tuple()
    if not {"+amx-tile", "+amx-bf16", "+avx512f"} <= set(features.split(",")):
        return False
    return sys.platform == "linux" and _granted()


def _granted() -> bool:
    """Ask Linux for the registers, which it hands out to processes that ask."""
    arch_prctl, request, tiles = 158, 0x1023, 18
    call = ctypes.CDLL(None).syscall
    return bool(call(ctypes.c_long(arch_prctl), ctypes.c_long(request), ctypes.c_long(tiles)) == 0)


class _Product(Writer):
    """All tiles of C: column tiles outside, so that panels of B stay in cache."""

    arguments = {  # noqa: RUF012
        "a": I16P,
        "part": I64,
        "a_rows": I32P,
        "a_row": I64,
        "a_steps": I32P,
        "b": I16P,
        "c": F32P,
        "c_rows": I32P,
        "c_row": I64,
        "d": F32P,
        "d_row": I64,
        "height": I64,
        "tiles": I64,
        "steps": I64,
        "columns": I64,
    }

    def __init__(self, module: ir.Module) -> None:
        super().__init__(module, "dptrain_tiles", self.arguments, SIDE)

    def write(self) -> None:
        b, columns = self.builder, self.args["columns"]
        self.configuration = b.alloca(ir.ArrayType(I64, 8))
        start: ir.Value = I64(0)
        for shape in _SHAPES:
            wide = shape.across * SIDE
            stop = b.mul(b.sdiv(columns, I64(wide)), I64(wide))
            with b.if_then(b.icmp_signed("<", start, stop)):
                self.configure(shape, I64(SIDE))
                self.loop(start, stop, [], functools.partial(self.panels, shape), step=wide)
            start = stop
        rest = b.sub(columns, start)
        with b.if_then(b.icmp_signed(">", rest, I64(0)), likely=False):
            self.configure(_SHAPES[-1], rest)
            self.panels(_SHAPES[-1], start, ())
        self.unit("tilerelease")

    def unit(self, name: str, *operands: ir.Value) -> None:
        """One of the unit's instructions."""
        kind = ir.FunctionType(ir.VoidType(), [operand.type for operand in operands])
        function = cgutils.get_or_insert_function(self.module, kind, f"llvm.x86.{name}")
        self.builder.call(function, operands)

    def configure(self, shape: _Shape, columns: ir.Value) -> None:
        """Set how many rows and bytes of a row the registers have."""
        b, place = self.builder, self.builder.bitcast(self.configuration, I8P)
        b.store(ir.Constant(ir.ArrayType(I64, 8), None), self.configuration)
        b.store(I8(1), place)
        height, width = b.trunc(self.args["height"], I8), b.trunc(b.mul(columns, I64(4)), I16)
        whole = I8(SIDE), I16(2 * STEPS)
        for registers, rows, bytes_ in (
            (shape.sums, height, width),
            (shape.rows, height, whole[1]),
            (shape.panels, whole[0], width),
        ):
            for register in registers:
                wide = b.gep(place, [I64(16 + 2 * register)])
                b.store(bytes_, b.bitcast(wide, I16P), align=1)
                b.store(rows, b.gep(place, [I64(48 + register)]))
        self.unit("ldtilecfg", place)

    def panels(
        self, shape: _Shape, column: ir.Value, _: Sequence[ir.Value]
    ) -> Sequence[ir.Value]:
        """All rows of the column tiles that begin at `column`."""
        b, tiles = self.builder, self.args["tiles"]
        panel = b.mul(b.mul(b.sdiv(column, I64(SIDE)), self.args["steps"]), I64(PANEL))
        panel = self.at(self.args["b"], panel)
        pairs = b.mul(b.sdiv(tiles, I64(2)), I64(2))

        def pair(m: ir.Value, _: Sequence[ir.Value]) -> Sequence[ir.Value]:
            self.tiles(shape, panel, column, [m, b.add(m, I64(1))])
            return []

        self.loop(I64(0), pairs, [], pair, step=2)
        with b.if_then(b.icmp_signed("<", pairs, tiles)):
            self.tiles(shape, panel, column, [pairs])
        return []

    def entry(self, table: str, index: ir.Value) -> ir.Value:
        """Offset that a table gives."""
        return self.builder.sext(self.builder.load(self.at(self.args[table], index)), I64)

    def tiles(
        self, shape: _Shape, panel: ir.Value, column: ir.Value, rows: Sequence[ir.Value]
    ) -> None:
        """Some row tiles by the column tiles of a shape."""
        b, args = self.builder, self.args
        places = [b.add(self.entry("c_rows", m), column) for m in rows]
        self.begin(shape, column, places)
        starts = [self.at(args["a"], self.entry("a_rows", m)) for m in rows]
        distance = b.mul(args["a_row"], I64(2))

        def step(t: ir.Value, _: Sequence[ir.Value]) -> Sequence[ir.Value]:
            moved = self.entry("a_steps", t)
            held: dict[int, int] = {}
            panels = b.mul(t, I64(PANEL))
            for part_a, part_b in shape.order:
                for m, start in enumerate(starts):
                    if held.get(shape.rows[m]) != part_a:
                        held[shape.rows[m]] = part_a
                        offset = b.add(moved, b.mul(args["part"], I64(part_a)))
                        self.load_tile(shape.rows[m], self.at(start, offset), distance)
                sets = len(shape.panels) // shape.across
                for j in range(shape.across):
                    register = shape.panels[part_b % sets * shape.across + j]
                    if held.get(register) != part_b:
                        held[register] = part_b
                        next_tile = b.mul(b.mul(args["steps"], I64(j)), I64(PANEL))
                        offset = b.add(b.add(panels, next_tile), I64(part_b * STEPS * SIDE))
                        self.load_tile(register, self.at(panel, offset), I64(64))
                for m in range(len(starts)):
                    for j in range(shape.across):
                        register = shape.panels[part_b % sets * shape.across + j]
                        total = shape.sums[m * shape.across + j]
                        self.unit("tdpbf16ps", I8(total), I8(shape.rows[m]), I8(register))
            return []

        self.loop(I64(0), args["steps"], [], step)
        for m, place in enumerate(places):
            for j in range(shape.across):
                target = self.at(args["c"], b.add(place, I64(j * SIDE)))
                bytes_ = b.mul(args["c_row"], I64(4))
                register = shape.sums[m * shape.across + j]
                self.unit("tilestored64", I8(register), b.bitcast(target, I8P), bytes_)

    def begin(self, shape: _Shape, column: ir.Value, places: Sequence[ir.Value]) -> None:
        """Let the sums start from D, or from zero."""
        b, args = self.builder, self.args
        with b.if_else(b.icmp_signed("<", args["d_row"], I64(0))) as (nothing, something):
            with nothing:
                for register in shape.sums[: len(places) * shape.across]:
                    self.unit("tilezero", I8(register))
            with something:
                same = b.icmp_signed("==", args["d_row"], I64(0))
                for m, place in enumerate(places):
                    start = b.select(same, column, place)
                    for j in range(shape.across):
                        source = self.at(args["d"], b.add(start, I64(j * SIDE)))
                        register = shape.sums[m * shape.across + j]
                        self.load_tile(register, source, b.mul(args["d_row"], I64(4)))

    def load_tile(self, register: int, pointer: ir.Value, distance: ir.Value) -> None:
        place = self.builder.bitcast(pointer, I8P)
        self.unit("tileloadd64", I8(register), place, distance)


def _parts(writer: Writer, value: ir.Value) -> list[ir.Value]:
    """The three parts of a vector of float32, as int32 whose upper halves are the bfloat16."""
    b = writer.builder
    ints = ir.VectorType(I32, writer.width)
    half, upper = (writer.splat(I32(bits)) for bits in (0x8000, 0xFFFF0000))
    parts = []
    for _ in range(PARTS - 1):
        # Half of a unit away from zero, so the rest has one bit less than by cutting off.
        rounded = b.and_(b.add(b.bitcast(value, ints), half), upper)
        parts.append(rounded)
        value = b.fsub(value, b.bitcast(rounded, writer.vector))
    return [*parts, b.bitcast(value, ints)]


class _Rows(Writer):
    """Split a run of float32 into parts, in the order of the source."""

    arguments = {"source": F32P, "target": I16P, "part": I64, "count": I64}  # noqa: RUF012

    def __init__(self, module: ir.Module) -> None:
        super().__init__(module, "dptrain_split_rows", self.arguments, SIDE)

    def write(self) -> None:
        b, args = self.builder, self.args
        whole = b.mul(b.sdiv(args["count"], I64(STEPS)), I64(STEPS))

        def body(i: ir.Value, _: Sequence[ir.Value], masked: bool = False) -> Sequence[ir.Value]:
            halves = []
            for h in range(2):
                if masked:
                    self.mask_after(b.sub(args["count"], b.add(i, I64(h * SIDE))))
                place = self.at(args["source"], b.add(i, I64(h * SIDE)))
                halves.append(_parts(self, self.load(place, masked=masked)))
            for p in range(PARTS):
                self.store_words(halves[0][p], halves[1][p], b.add(i, b.mul(args["part"], I64(p))), masked)
            return []

        self.loop(I64(0), whole, [], body, step=STEPS)
        with b.if_then(b.icmp_signed("<", whole, args["count"])):
            body(whole, [], True)

    def store_words(self, low: ir.Value, high: ir.Value, place: ir.Value, masked: bool) -> None:
        """Store the upper halves of two vectors, side by side."""
        b = self.builder
        words = ir.VectorType(I16, 2 * SIDE)
        odd = ir.Constant(ir.VectorType(I32, 2 * SIDE), list(range(1, 4 * SIDE, 2)))
        packed = b.shuffle_vector(b.bitcast(low, words), b.bitcast(high, words), odd)
        target = b.bitcast(self.at(self.args["target"], place), words.as_pointer())
        if not masked:
            b.store(packed, target, align=2)
            return
        lanes = ir.Constant(ir.VectorType(I16, 2 * SIDE), list(range(2 * SIDE)))
        count = b.trunc(b.sub(self.args["count"], b.and_(self.args["count"], I64(-STEPS))), I16)
        kind = ir.VectorType(I16, 2 * SIDE)
        first = b.insert_element(ir.Constant(kind, ir.Undefined), count, I32(0))
        every = ir.Constant(ir.VectorType(I32, 2 * SIDE), [0] * (2 * SIDE))
        every = b.shuffle_vector(first, ir.Constant(kind, ir.Undefined), every)
        mask = b.icmp_signed("<", lanes, every)
        kind = ir.FunctionType(ir.VoidType(), [words, target.type, I32, mask.type])
        name = "llvm.masked.store.v32i16.p0v32i16"
        function = cgutils.get_or_insert_function(self.module, kind, name)
        b.call(function, [packed, target, I32(2), mask])


class _Panels(Writer):
    """Split a matrix into panels of B."""

    arguments = {  # noqa: RUF012
        "source": F32P,
        "source_row": I64,
        "target": I16P,
        "rows": I64,
        "columns": I64,
        "tile": I64,
    }

    def __init__(self, module: ir.Module) -> None:
        super().__init__(module, "dptrain_split_panels", self.arguments, SIDE)

    def write(self) -> None:
        b, args = self.builder, self.args

        def column(k: ir.Value, _: Sequence[ir.Value]) -> Sequence[ir.Value]:
            self.mask_after(b.sub(args["columns"], k))
            target = self.at(args["target"], b.mul(b.sdiv(k, I64(SIDE)), args["tile"]))

            def pair(i: ir.Value, _: Sequence[ir.Value]) -> Sequence[ir.Value]:
                panel = b.mul(b.sdiv(i, I64(STEPS)), I64(PANEL))
                inside = b.mul(b.srem(i, I64(STEPS)), I64(SIDE))
                place = self.at(target, b.add(panel, inside))
                rows = [self.row(b.add(i, I64(h)), k) for h in range(2)]
                sixteen = self.splat(I32(16))
                upper = self.splat(I32(0xFFFF0000))
                for p in range(PARTS):
                    low, high = b.lshr(rows[0][p], sixteen), b.and_(rows[1][p], upper)
                    spot = self.at(place, I64(p * STEPS * SIDE))
                    spot = b.bitcast(spot, ir.VectorType(I32, SIDE).as_pointer())
                    b.store(b.or_(low, high), spot, align=4)
                return []

            steps = b.mul(b.sdiv(b.add(args["rows"], I64(STEPS - 1)), I64(STEPS)), I64(STEPS))
            self.loop(I64(0), steps, [], pair, step=2)
            return []

        self.loop(I64(0), args["columns"], [], column, step=SIDE)

    def row(self, i: ir.Value, column: ir.Value) -> list[ir.Value]:
        """Parts of 16 elements of a row; of zeros beyond the last."""
        b, args = self.builder, self.args
        exists = b.icmp_signed("<", i, args["rows"])
        row = b.select(exists, i, I64(0))
        place = self.at(args["source"], b.add(b.mul(row, args["source_row"]), column))
        value = self.load(place, masked=True)
        return _parts(self, b.select(exists, value, self.zero))


class _Turned(Writer):
    """Split 16 pixels of 16 channels into rows of A by channel, once for every column of a filter.

    Copy s holds the pixels that filter column s meets, so pixel j lies at j − s + left of its row
    of the output, if it has one.
    """

    arguments = {  # noqa: RUF012
        "source": F32P,
        "source_row": I64,
        "target": I16P,
        "pixels": I64,
        "channel": I64,
        "part": I64,
        "copy": I64,
        "copies": I64,
        "width": I64,
        "column": I64,
    }

    def __init__(self, module: ir.Module) -> None:
        super().__init__(module, "dptrain_split_turned", self.arguments, SIDE)

    def write(self) -> None:
        b, args = self.builder, self.args
        words = ir.VectorType(I16, SIDE)
        lanes = ir.Constant(ir.VectorType(I32, SIDE), list(range(SIDE)))
        masks = b.alloca(I16, size=I64(MOST_COPIES))
        exists = b.icmp_signed("<", lanes, self.splat(b.trunc(args["pixels"], I32)))

        def mask(s: ir.Value, _: Sequence[ir.Value]) -> Sequence[ir.Value]:
            place = b.add(lanes, self.splat(b.trunc(b.sub(args["column"], s), I32)))
            width = self.splat(b.trunc(args["width"], I32))
            chosen = b.and_(exists, b.icmp_unsigned("<", place, width))
            b.store(b.bitcast(chosen, I16), self.at(masks, s))
            return []

        self.loop(I64(0), args["copies"], [], mask)
        rows = []
        for i in range(SIDE):
            present = b.icmp_signed("<", I64(i), args["pixels"])
            row = b.select(present, I64(i), I64(0))
            rows.append(self.load(self.at(args["source"], b.mul(row, args["source_row"]))))
        for q, row in enumerate(transposed(self, rows)):
            parts = [
                b.trunc(b.lshr(part, self.splat(I32(16))), words) for part in _parts(self, row)
            ]
            target = self.at(args["target"], b.add(args["column"], b.mul(args["channel"], I64(q))))

            def store(s: ir.Value, _: Sequence[ir.Value], parts: Any = parts, target: ir.Value = target) -> Sequence[ir.Value]:
                chosen = b.bitcast(b.load(self.at(masks, s)), ir.VectorType(ir.IntType(1), SIDE))
                place = self.at(target, b.mul(s, b.sub(args["copy"], I64(1))))
                kind = words.as_pointer()
                for p, part in enumerate(parts):
                    spot = b.bitcast(self.at(place, b.mul(args["part"], I64(p))), kind)
                    signature = ir.FunctionType(
                        ir.VoidType(), [words, kind, I32, chosen.type]
                    )
                    name = "llvm.masked.store.v16i16.p0v16i16"
                    function = cgutils.get_or_insert_function(self.module, signature, name)
                    b.call(function, [part, spot, I32(2), chosen])
                return []

            self.loop(I64(0), args["copies"], [], store)


def _emit(writer: Any) -> Any:
    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        kinds: list[Any] = []
        flat: list[ir.Value] = []
        for group, value in zip(sig.args, args, strict=True):
            grouped = isinstance(group, types.BaseTuple)
            kinds += group.types if grouped else [group]
            flat += cgutils.unpack_tuple(builder, value) if grouped else [value]
        flat = flatten_arguments(context, builder, kinds, flat)
        builder.call(writer(builder.module).function, flat)
        return context.get_dummy_value()

    return codegen


@intrinsic
def multiply_tiles(typingctx, a, part, a_rows, a_row, a_steps, b, c, c_rows, c_row, d, d_row, shape):  # type: ignore[no-untyped-def]
    """C = D + A·B from operands that `split_rows` and `split_panels` prepared.

    Row tile m of A begins at ``a + a_rows[m]``, its rows are `a_row` apart, and panel t of the sum
    at ``a_steps[t]`` behind that. Row tile m of C begins at ``c + c_rows[m]``.

    Args:
        a, a_rows, a_steps, b, c, c_rows: (contiguous array, start).
        part: distance of the parts of A.
        a_row, c_row: distances of rows.
        d, d_row: (array, start) and distance of its rows: 0 for one row of bias, that of C for
            what C holds, negative for nothing.
        shape: (rows of a tile, row tiles, panels, columns).
    """
    sig = types.none(a, part, a_rows, a_row, a_steps, b, c, c_rows, c_row, d, d_row, shape)
    return sig, _emit(_Product)


@intrinsic
def split_rows(typingctx, source, target, part, count):  # type: ignore[no-untyped-def]
    """Split `count` elements; source and target are (contiguous array, start)."""
    return types.none(source, target, part, count), _emit(_Rows)


@intrinsic
def split_panels(typingctx, source, source_row, target, shape):  # type: ignore[no-untyped-def]
    """Split a matrix into panels.

    Args:
        source, target: (contiguous array, start).
        source_row: distance of rows.
        shape: (rows, columns, elements of `target` from one column tile to the next).
    """
    return types.none(source, source_row, target, shape), _emit(_Panels)


@intrinsic
def split_turned(typingctx, source, source_row, target, shape, column):  # type: ignore[no-untyped-def]
    """Split at most 16 pixels of 16 channels, channel by channel.

    Args:
        source, target: (contiguous array, start); `target` where the row of the output begins.
        source_row: distance of pixels.
        shape: (pixels, distance of channels, of parts, of copies; copies; width of the output).
        column: of the first pixel in copy 0, negative where it has none.
    """
    return types.none(source, source_row, target, shape, column), _emit(_Turned)
